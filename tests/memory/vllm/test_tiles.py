"""A block of a latent cache on the CPU is as large as the kernel takes it there, which AMX decides since vLLM 0.29."""

from __future__ import annotations

import pytest

from oomguard.memory.constants import engine_version
from oomguard.memory.model.shape import ModelShape
from oomguard.memory.vllm import refusals
from oomguard.memory.vllm.start import VllmSettings


@pytest.mark.parametrize(
    ("version", "has_tiles", "device", "multiple"),
    [
        ("0.32.0", True, "cpu", 32),
        ("0.32.0", False, "cpu", 16),
        ("0.28.0", True, "cpu", 16),
        ("0.32.0", True, "cuda", 16),
    ],
)
def test_a_block_of_a_latent_cache_follows_the_kernel(monkeypatch, version, has_tiles, device, multiple):
    monkeypatch.setattr(refusals, "has_matrix_tiles", lambda: has_tiles)
    monkeypatch.setattr(refusals, "keeps_latent", lambda _shape: True)
    settings = VllmSettings(engine_version(version), 2**34, 0.9, device=device)
    assert refusals.block_multiple_tokens(settings, ModelShape.__new__(ModelShape)) == multiple
