"""Take a device's blocks back to the moment at which its last allocation failed: what happened since is undone, the last event first.

A program that dumps a snapshot where it handles the failure has freed memory by then. The history tells what, by address and size; the
blocks of that moment follow where every event since can be undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

# A segment with its blocks, as they stand in a snapshot.
Row = tuple[dict[str, Any], list[Any]]

# What is in a history and moves no memory; expandable segments that grew or shrank (segment_map, segment_unmap) are not undone.
_MOVES_NOTHING: Final = ("oom", "snapshot", "user_defined")
# Sizes are rounded up to it, and segments above the second serve large blocks: kMinBlockSize, kSmallBuffer of CUDACachingAllocator.cpp.
_ROUNDED_BYTES: Final = 512
_SMALL_SEGMENT_BYTES: Final = 2 << 20
_MOST_BYTES: Final = 1 << 60


class _LostError(Exception):
    """An event that does not fit the blocks: they cannot be taken back beyond it."""


def events_since_refusal(trace: list[Any]) -> list[tuple[dict[str, Any], Any]]:
    """Return the events after the last refusal that moved memory, each with the stack that allocated its block, as far as it is known."""
    last = max((at for at, event in enumerate(trace) if _action(event) == "oom"), default=len(trace))
    allocated_by: dict[int, Any] = {}
    since = []
    for at, event in enumerate(trace):
        action = _action(event)
        if action is None or action in _MOVES_NOTHING:
            continue
        address = event.get("addr")
        if action == "alloc" and type(address) is int:
            allocated_by[address] = event.get("frames")
        if at > last:
            since.append((event, allocated_by.get(address) if type(address) is int else None))
    return since


def rewound(rows: Iterable[Row], since: list[tuple[dict[str, Any], Any]], device: int) -> list[Row] | None:
    """Return the segments of a device, with their blocks, as they were before these events; None where they do not lead back."""
    try:
        past = _Past(rows, device)
        for event, frames in reversed(since):
            past.undo(event, frames)
        return list(past.rows())
    except _LostError:
        return None


class _Past:
    """The blocks in use and the segments, by address; what lies between blocks is free."""

    def __init__(self, rows: Iterable[Row], device: int) -> None:
        self._device = device
        self._blocks: dict[int, dict[str, Any]] = {}
        self._segments: dict[int, tuple[dict[str, Any], int]] = {}
        for segment, blocks in rows:
            begin = at = _number(segment.get("address"))
            for block in blocks:
                size = _number(block.get("size") if type(block) is dict else None)
                if block.get("state") != "inactive":
                    self._blocks[at] = block
                at += size
            if begin in self._segments:
                raise _LostError
            self._segments[begin] = segment, at - begin

    def undo(self, event: dict[str, Any], frames: Any) -> None:
        action, address, size = _action(event), _number(event.get("addr")), _number(event.get("size"))
        block = self._blocks.get(address)
        is_live = block is not None and block.get("state") == "active_allocated"
        if action == "alloc" and is_live:
            del self._blocks[address]
        elif action == "free_requested" and block is not None and not is_live:
            self._blocks[address] = {**block, "state": "active_allocated"}
        elif action == "free_completed" and block is None:
            rounded = max(_ROUNDED_BYTES, -(-size // _ROUNDED_BYTES) * _ROUNDED_BYTES)
            waiting = {"size": rounded, "requested_size": size, "state": "active_pending_free", "frames": frames}
            self._blocks[address] = waiting
        elif action == "segment_alloc" and self._segments.get(address, (None, -1))[1] == size:
            del self._segments[address]
        elif action == "segment_free" and address not in self._segments:
            kind = "large" if size > _SMALL_SEGMENT_BYTES else "small"
            about = {"device": self._device, "address": address, "stream": event.get("stream"), "segment_type": kind}
            self._segments[address] = about, size
        else:
            raise _LostError

    def rows(self) -> Iterator[Row]:
        """Yield the segments with their blocks, the free ones between those in use with them; every block must lie in a segment."""
        addresses = sorted(self._blocks, reverse=True)
        for begin, (segment, size) in sorted(self._segments.items(), key=lambda item: item[0]):
            at, end, blocks = begin, begin + size, []
            while addresses and addresses[-1] < end:
                address = addresses.pop()
                block = self._blocks[address]
                if address < at or address + block["size"] > end:
                    raise _LostError
                blocks += _free(address - at)
                blocks.append(block)
                at = address + block["size"]
            yield segment, blocks + _free(end - at)
        if addresses:
            raise _LostError


def _free(size: int) -> list[dict[str, Any]]:
    return [{"size": size, "state": "inactive"}] if size else []


def _action(event: Any) -> str | None:
    action = event.get("action") if type(event) is dict else None
    return action if isinstance(action, str) else None


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST_BYTES:
        raise _LostError
    return value
