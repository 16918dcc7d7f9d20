"""What a processor can do decides the blocks of a latent cache (AMX, since vLLM 0.29) and a recurrent state's type on the CPU."""

from __future__ import annotations

from oomguard.estimate.constants import engine_version
from oomguard.estimate.model.shape import ModelShape
from oomguard.estimate.start import kv_cache, start
from oomguard.estimate.start.start import VllmSettings
from oomguard.probe import host


def test_a_block_of_a_latent_cache_follows_the_kernel(subtests, monkeypatch):
    def check(version, has_tiles, device, multiple):
        monkeypatch.setattr(host, "has_matrix_tiles", lambda: has_tiles)
        monkeypatch.setattr(start, "keeps_latent", lambda _shape: True)
        settings = VllmSettings(engine_version(version), 2**34, 0.9, device=device)
        assert start.block_multiple_tokens(settings, ModelShape.__new__(ModelShape)) == multiple

    for version, has_tiles, device, multiple in [
        ("0.32.0", True, "cpu", 32),
        ("0.32.0", False, "cpu", 16),
        ("0.28.0", True, "cpu", 16),
        ("0.32.0", True, "cuda", 16),
    ]:
        with subtests.test(version=version, has_tiles=has_tiles, device=device, multiple=multiple):
            check(version, has_tiles, device, multiple)


def test_recurrent_state_is_float32_if_the_cpu_has_bfloat16(subtests, monkeypatch):
    def check(multiplies, device, asked, size):
        monkeypatch.setattr(host, "multiplies_in_bfloat16", lambda: multiplies)
        settings = VllmSettings(
            engine_version("0.32.0"), 2**34, 0.9, device=device, mamba_ssm_cache_dtype=asked
        )
        assert kv_cache._state_bytes(settings) == size

    for multiplies, device, asked, size in [
        (True, "cpu", "auto", 4),
        (False, "cpu", "auto", None),  # the model's own
        (False, "cpu", "float32", 4),
        (True, "cuda", "auto", None),
    ]:
        with subtests.test(multiplies=multiplies, device=device, asked=asked, size=size):
            check(multiplies, device, asked, size)
