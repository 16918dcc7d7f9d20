"""What a refused allocation asked for, where its message holds no size."""

from __future__ import annotations

import pytest

import oomguard
from oomguard.facts import MIB


def tried(text: str) -> object:
    """Return the size asked for of a text's first incident, None where none is known."""
    fact = oomguard.diagnose(text).incidents[0].facts.get("tried_bytes")
    return None if fact is None else fact.value


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("cudaMalloc of 2147483648 bytes failed: out of memory", 2048 * MIB),
        ("hipMalloc failed to allocate 1000 MB: hipErrorOutOfMemory", 1000 * MIB),
        ("vkAllocateMemory failed for 1610612736 bytes: VK_ERROR_OUT_OF_DEVICE_MEMORY", 1536 * MIB),
        ("OpenCL error: clCreateBuffer(536870912 bytes) CL_MEM_OBJECT_ALLOCATION_FAILURE", 512 * MIB),
    ],
)
def test_a_size_on_the_messages_line_is_what_was_asked_for(text: str, size_bytes: int) -> None:
    assert tried(text) == size_bytes


@pytest.mark.parametrize(
    ("count", "size_bytes"),
    [
        ("268435456 elements of float32", 1024 * MIB),
        ("268435456 elements of torch.bfloat16", 512 * MIB),
        ("268435456 floats", 1024 * MIB),
        ("268435456 elements", None),
        ("4096 tokens", None),
        ("1.6e9 bytes", None),
    ],
)
def test_a_count_becomes_bytes_by_its_type_or_is_no_size(count: str, size_bytes: int | None) -> None:
    assert tried(f"ERROR: Failed to allocate {count}: out of memory") == size_bytes


def test_what_a_model_needs_is_not_what_was_asked_for() -> None:
    assert tried("RuntimeError: CUDA error: out of memory (this model needs 24 GB)") is None
