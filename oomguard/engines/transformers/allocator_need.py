"""What a traced call needs of a device whose memory torch's caching allocator hands out in blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from oomguard.facts import MIB
from oomguard.memory.generate.caching_allocator import Segment, replay, segment_bytes
from oomguard.observe import torch_memory

# Kernels' own memory, of which a trace sees only what scratch.toml knows. cuBLAS keeps a workspace of up to 32 MiB a handle (torch's
# default on Hopper), which the call that failed has mostly made; of a small room less is set aside, or nothing would be left.
_SCRATCH_BYTES: Final = 64 * MIB
_SCRATCH_SHARE: Final = 128
Event = tuple[int, int]
Trace = TypeVar("Trace")


class AllocatorNeed:
    """What calls of a model need of its device; what the allocator holds is read once, as it is after a failure.

    Args:
        weights: a tensor of the model.
    """

    def __init__(self, weights: Any) -> None:
        self._is_cuda = weights.device.type == "cuda"
        self.hands_out_blocks = self._is_cuda or (torch_memory.is_cached() and torch_memory.counts(weights))

    @functools.cached_property
    def _segments(self) -> list[Segment] | None:
        held = torch_memory.segments()
        return None if held is None else [Segment(small, pieces) for small, pieces in held]

    def need_bytes(self, tensor_bytes: int, events: Callable[[], Iterable[Event]], room_bytes: int | None) -> int:
        """Return what a call takes beyond what is alive before it; above ``room_bytes`` where the allocator would run out.

        A need within the room is replayed through the allocator's rules, from the segments that it holds: what is alive stands
        in some of their blocks, and the rest of them is to be had in pieces.

        Args:
            tensor_bytes: the most that its tensors are at once.
            events: returns its allocations and ends, beyond weights and inputs.
            room_bytes: what may be taken beyond what is alive; None where that is not known.
        """
        spare = 0
        if self._is_cuda:
            spare = _SCRATCH_BYTES if room_bytes is None else min(_SCRATCH_BYTES, room_bytes // _SCRATCH_SHARE)
        need = tensor_bytes + spare
        if not self.hands_out_blocks or room_bytes is None or need > room_bytes or self._segments is None:
            return need
        used_bytes = sum(segment.used_bytes for segment in self._segments)
        # Best fit moves every block behind one that no trace saw: what fits by luck on this room alone does not on a smaller one.
        rooms = sorted({room_bytes - spare, room_bytes})
        if all(replay(events(), used_bytes + room, self._segments) is not None for room in rooms):
            return need
        # What it takes of a larger device tells by how much: with one byte too many the search would go down row by row.
        return max(room_bytes + 1, (replay(events(), None, self._segments) or 0) - used_bytes)


def is_asked_for(events: Iterable[Event], size_bytes: float, slack_bytes: float) -> bool:
    """Return whether a call asks its device for so many bytes at once, as torch's message tells them."""
    return any(abs(segment_bytes(abs(size)) - size_bytes) <= slack_bytes for _, size in events if size)


def largest_two(traces: Mapping[int, Trace], rows: int) -> tuple[Trace, Trace, float] | None:
    """Return what the two largest numbers of rows were traced with, and where ``rows`` lies on the line through them; None of one."""
    if len(traces) < 2:
        return None
    one, other = sorted(traces)[-2:]
    return traces[one], traces[other], (rows - one) / (other - one)
