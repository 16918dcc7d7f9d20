"""What a traced call needs of a device whose memory torch's caching allocator hands out in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from oomguard.facts import MIB
from oomguard.memory.generate.caching_allocator import Segment, replay
from oomguard.observe import torch_memory

# Kernels' own memory, which no trace sees. cuBLAS keeps a workspace of up to 32 MiB a handle (torch's default on Hopper), which
# the call that failed has mostly made; of a small room less is set aside, or nothing would be left.
_SCRATCH_BYTES: Final = 64 * MIB
_SCRATCH_SHARE: Final = 128


def hands_out_blocks(weights: Any) -> bool:
    """Return whether what is computed with these weights takes its memory from torch's caching allocator."""
    return weights.device.type == "cuda" or (torch_memory.is_cached() and torch_memory.counts(weights))


def need_in_blocks(
    need_bytes: int, events: Callable[[], Iterable[tuple[int, int]]], weights: Any, room_bytes: int | None
) -> int:
    """Return what a call takes beyond what is alive before it; above ``room_bytes`` where the allocator would run out.

    A need within the room is replayed through the allocator's rules, from the segments that it holds now: what is alive stands
    in some of their blocks, and the rest of them is to be had in pieces.

    Args:
        need_bytes: the most that its tensors are at once.
        events: returns its allocations and ends, beyond weights and inputs.
        weights: a tensor of the model.
        room_bytes: what may be taken beyond what is alive; None where that is not known.
    """
    if not hands_out_blocks(weights):
        return need_bytes
    if weights.device.type == "cuda":
        need_bytes += _SCRATCH_BYTES if room_bytes is None else min(_SCRATCH_BYTES, room_bytes // _SCRATCH_SHARE)
    held = torch_memory.segments() if room_bytes is not None and need_bytes <= room_bytes else None
    if held is None or room_bytes is None:
        return need_bytes
    segments = [Segment(small, pieces) for small, pieces in held]
    used_bytes = sum(segment.used_bytes for segment in segments)
    if replay(events(), used_bytes + room_bytes, segments) is not None:
        return need_bytes
    # What it takes of a larger device tells by how much: with one byte too many the search would go down row by row.
    return max(room_bytes + 1, (replay(events(), None, segments) or 0) - used_bytes)
