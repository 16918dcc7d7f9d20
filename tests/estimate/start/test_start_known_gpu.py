"""The GPU of a start among the known ones: by its name, else by its size; what its kernels and links take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from oomguard.estimate.start.start import (
    VllmSettings,
    architecture_of,
    fused_allreduce_bytes,
    has_custom_allreduce,
    has_nvlink,
    is_hopper_or_later,
    is_rocm,
    known_gpu,
    mxfp4_padding,
    nvfp4_padding,
)

GIB = 2**30
SETTINGS = VllmSettings(Version("0.19"), round(79.19 * GIB), 0.9, tensor_parallel_size=2)


def on(total_gib: float, name: str | None = None, **changes: object) -> VllmSettings:
    return replace(SETTINGS, gpu_total_bytes=round(total_gib * GIB), gpu_name=name, **changes)


def test_a_gpu_is_known_by_its_name_else_by_its_size(subtests):
    for total_gib, name, found in [
        (79.19, None, "H100"),
        (44.4, None, "L40S"),
        (24.0, "NVIDIA GeForce RTX 4090", "RTX 4090"),
        (93.1, "NVIDIA H100 NVL", "H100 NVL"),
        (94.97, None, "RTX PRO 6000"),
        (33.0, None, None),
        (24.0, None, None),  # an AMD of that size is one by its name only
        (24.0, "AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
    ]:
        with subtests.test(total_gib=total_gib, name=name, found=found):
            assert (known_gpu(on(total_gib, name)) or {}).get("name") == found


def test_links_follow_the_gpu_and_of_an_unknown_one_its_size(subtests):
    for settings, linked in [
        (on(79.19), True),
        (on(44.42), False),
        (on(94.97), False),
        (on(119.0), True),  # not known, and as large as those that are linked
        (on(10.0), False),
        (on(79.2, "L40S"), False),
    ]:
        with subtests.test(settings=settings, linked=linked):
            assert has_nvlink(settings) is linked


def test_fused_all_reduce_has_buffers_in_versions_with_it(subtests):
    for settings, gib in [
        (on(79.19), 1.5),
        (on(79.19, tensor_parallel_size=8), 1.5),
        (on(79.19, version=Version("0.22")), 0.5),
        (on(79.19, version=Version("0.22"), tensor_parallel_size=4), 1 / 32),
        (on(79.19, version=Version("0.16")), 0),
        (on(79.19, pipeline_parallel_size=2), 0),
        (on(79.19, enforce_eager=True), 0),
        (on(79.19, tensor_parallel_size=1), 0),
        (on(44.42), 0),
        (on(79.25, "A100"), 0),
    ]:
        with subtests.test(settings=settings, gib=gib):
            assert fused_allreduce_bytes(settings) == gib * GIB


def test_four_bit_experts_are_padded_for_their_kernels():
    assert mxfp4_padding(on(79.25, "A100"), 2880, 2880) == pytest.approx(3072 / 2880 * 2944 / 2880)
    assert mxfp4_padding(on(44.42), 2880, 1440) == pytest.approx(3072 / 2880 * 1536 / 1440)
    assert mxfp4_padding(replace(SETTINGS, device="cpu"), 2880, 2880) == 1


def test_amds_are_told_from_others():
    assert is_rocm(on(191.98))
    assert not is_rocm(on(79.19))


def test_experts_without_a_gate_are_padded_for_four_bit_gpus():
    assert nvfp4_padding(on(15.47, "RTX 5070 Ti"), 928) == 1024 / 928
    assert nvfp4_padding(on(15.47, "RTX 5070 Ti"), 1024) == 1
    assert nvfp4_padding(on(79.25, "A100"), 928) == 1


def test_an_architecture_is_a_known_gpus_or_what_its_name_says(subtests):
    for settings, architecture, later in [
        (on(79.19), "hopper", True),
        (on(24.0, "NVIDIA RTX PRO 4500 Blackwell"), "blackwell", False),
        (on(178.35), "blackwell", True),
        (on(79.19, "NVIDIA RTX 6000 Ada Generation"), "ada", False),
        (on(24.0, "some card"), None, False),
    ]:
        with subtests.test(settings=settings, architecture=architecture, later=later):
            assert architecture_of(settings) == architecture
            assert is_hopper_or_later(settings) is later


def test_vllm_has_its_own_all_reduce_between_linked_gpus(
    subtests,
):
    for settings, own in [
        (on(79.19), True),
        (on(79.19, disable_custom_all_reduce=True), False),
        (on(79.19, tensor_parallel_size=1), False),
        (on(44.42), True),
        (on(44.42, tensor_parallel_size=4), False),
        (on(23.65, "RTX 4090"), False),  # reads no other GPU's memory
    ]:
        with subtests.test(settings=settings, own=own):
            assert has_custom_allreduce(settings) is own
