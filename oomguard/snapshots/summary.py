"""Sum up what ``torch.cuda.memory._snapshot()`` returns, of torch 2.0 to 2.13: segments, blocks, stacks, the last refusal.

The forms differ: 2.0 keeps a block's stack in its ``history``, pools have ids since 2.1, expandable segments are told since 2.2, a
block that waits is ``active_pending_free`` in what is dumped and ``active_awaiting_free`` in the documentation. What a version does
not tell is None here. Every list is walked once: a file that refers to one list a thousand times is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from oomguard.snapshots.contradictions import Contradictions
from oomguard.snapshots.frames import Stacks, python_frames
from oomguard.snapshots.pickled import MOST_CONTAINERS, RefusedError
from oomguard.snapshots.records import DeviceMemory, Frame, LiveStack, Refusal, SegmentGroup, Snapshot
from oomguard.snapshots.rewind import Row, events_since_refusal, rewound

KEPT_STACKS: Final = 20
KEPT_GROUPS: Final = 50
KEPT_REFUSALS: Final = 20
# Blocks of an allocation above it are large: kSmallSize of c10/core/AllocatorConfig.h, torch 2.1 to 2.13.
_SMALL_BYTES: Final = 1 << 20
_LIVE: Final = "active_allocated"
_WAITING: Final = ("active_pending_free", "active_awaiting_free")  # no set: a wrong state may be a list
_FREE: Final = "inactive"
_MOST_BYTES: Final = 1 << 60
_MOST_DEVICES: Final = 1024
_NO_SEGMENTS: Final = "it is a pickle, but no allocation snapshot: it has no segments"

_Group = tuple[tuple[int, int] | None, int, bool | None, bool]


def summarize(raw: Any) -> Snapshot:
    """Return a snapshot's summary.

    Raises:
        RefusedError: it is no snapshot, or not as torch writes one; the text says what is wrong in it.
    """
    if not isinstance(raw, dict) or not isinstance(raw.get("segments"), list):
        raise RefusedError(_NO_SEGMENTS)
    once, stacks, odd = _Once(), Stacks(), Contradictions()
    by_device: dict[int, _Device] = {}
    rows: dict[int, list[Row]] = {}
    numbers: dict[int, int] = {}
    for number, segment in enumerate(once.items(raw["segments"], "segments")):
        if not isinstance(segment, dict):
            raise RefusedError(f"its segment {number} is no dict")
        index = _size(segment.get("device", 0), f"segment {number} has the device")
        if odd.is_again(index, segment, number):  # a copy, or the same object: not walked again
            continue
        once.take(segment, f"segment {number}")
        blocks = once.items(segment.get("blocks"), f"blocks of segment {number}")
        odd.compare(segment, blocks, number)
        by_device.setdefault(index, _Device(index, stacks))
        rows.setdefault(index, []).append((segment, blocks))
        numbers[id(segment)] = number
        if len(by_device) > _MOST_DEVICES:
            raise RefusedError(f"it has more than {_MOST_DEVICES} devices")
    traces = raw.get("device_traces")
    for index, trace in enumerate(once.items(traces, "device_traces") if traces else ()):
        if isinstance(trace, list) and trace and index < _MOST_DEVICES:
            once.items(trace, f"device_traces[{index}]")
            by_device.setdefault(index, _Device(index, stacks)).follow(trace)
    for index, device in by_device.items():
        for segment, blocks in device.at_refusal(rows.get(index, [])):
            device.add(segment, blocks, numbers.get(id(segment), -1))
    devices = tuple(by_device[index].summary() for index in sorted(by_device))
    return Snapshot(devices, _settings(raw.get("allocator_settings")), (*odd.notes(), *_notes(devices)))


class _Once:
    """Refuses a list or a dict that comes a second time, and more entries than dicts: shared, a small file could be walked without end."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._entries = 0

    def take(self, value: Any, name: str) -> None:
        if id(value) in self._seen:
            raise RefusedError(f"its {name} stands in it twice")
        self._seen.add(id(value))

    def items(self, value: Any, name: str) -> list[Any]:
        if not isinstance(value, list):
            raise RefusedError(f"its {name} is no list")
        if value:
            self.take(value, name)
        self._entries += len(value)
        if self._entries > MOST_CONTAINERS:
            raise RefusedError(f"its lists have more than {MOST_CONTAINERS:,} entries")
        return value


class _Device:
    """Adds up the segments and the history of one device."""

    def __init__(self, index: int, stacks: Stacks) -> None:
        self._index, self._stacks = index, stacks
        self._segments = self._blocks = self._requested = self._waiting = self._split = self._free = 0
        self._groups: dict[_Group, list[int]] = {}
        self._live: dict[int, tuple[tuple[Frame, ...], list[int]]] = {}
        self._ooms: list[dict[str, Any]] = []
        self._since: list[tuple[dict[str, Any], Any]] = []
        self._events = 0
        self._is_later = False

    def at_refusal(self, rows: list[Row]) -> list[Row]:
        """Return the segments as they were when the last allocation failed; as they were dumped where the history does not lead back."""
        if not self._since:
            return rows
        past = rewound(rows, self._since, self._index)
        self._is_later = past is None
        return rows if past is None else past

    def add(self, segment: dict[str, Any], blocks: list[Any], number: int) -> None:
        """Add one segment with its blocks."""
        group = self._groups.setdefault(_group(segment), [0, 0, 0, 0, 0, 0])
        live = waiting = free = largest = count = 0
        for block in blocks:
            if type(block) is not dict:
                raise RefusedError(f"a block of segment {number} is no dict")
            size, state = block.get("size"), block.get("state")
            if type(size) is not int or not 0 <= size < _MOST_BYTES:
                raise RefusedError(f"a block of segment {number} has the size {_told(size)}")
            if state == _LIVE:
                live += size
                self._allocate(block, size)
            elif state == _FREE:
                free += size
                largest = max(largest, size)
            elif state in _WAITING:
                waiting += size
            else:
                raise RefusedError(f"a block of segment {number} has the state {_told(state)}")
            count += 1
        reserved = live + waiting + free
        self._segments += 1
        self._blocks += count
        self._waiting += waiting
        is_free = reserved == free
        self._free += free if is_free else 0
        self._split += 0 if is_free else free
        for place, value in enumerate((1, reserved, live + waiting, free)):
            group[place] += value
        group[4] = max(group[4], largest)
        group[5] += waiting

    def _allocate(self, block: dict[str, Any], size: int) -> None:
        requested, frames = block.get("requested_size"), block.get("frames")
        history = block.get("history")
        if frames is None and type(history) is list and history and type(history[0]) is dict:  # torch 2.0
            frames = history[0].get("frames")
            requested = history[0].get("real_size", requested)
        self._requested += requested if type(requested) is int and 0 <= requested <= size else size
        lines = self._stacks.of(frames)
        row = self._live.get(id(lines))
        if row is None:
            row = self._live[id(lines)] = (lines, [0, 0, 0])
        counts = row[1]
        counts[0] += size
        counts[1] += 1
        counts[2] = max(counts[2], size)

    def follow(self, trace: list[Any]) -> None:
        """Look for refusals in the recorded history, and for what happened after the last one, which counts."""
        self._events = len(trace)
        self._ooms = [event for event in trace if type(event) is dict and event.get("action") == "oom"]
        self._since = events_since_refusal(trace) if self._ooms else []

    def _refusal(self, groups: list[SegmentGroup]) -> Refusal | None:
        """Return the last allocation that failed, with what was free where it could have been placed, as far as that is known."""
        if not self._ooms:
            return None
        refusal, stream = self._refused(self._ooms[-1]), self._ooms[-1].get("stream")
        if self._is_later:
            return refusal
        stream, is_large = stream if type(stream) is int else 0, refusal.tried_bytes > _SMALL_BYTES
        usable = [g for g in groups if g.pool is None and g.stream == stream and g.is_large in {None, is_large}]
        return replace(
            refusal,
            free_blocks_bytes=sum(group.free_bytes for group in usable),
            largest_free_bytes=max((group.largest_free_bytes for group in usable), default=0),
            waiting_blocks_bytes=sum(group.waiting_bytes for group in usable),
        )

    def _refused(self, event: dict[str, Any]) -> Refusal:
        tried, free = _size(event.get("size"), "its out-of-memory event has the size"), event.get("device_free")
        frames = event.get("frames")
        known_free = free if type(free) is int and 0 <= free < _MOST_BYTES else None
        return Refusal(tried, known_free, frames=self._stacks.of(frames), traceback=python_frames(frames))

    def summary(self) -> DeviceMemory:
        """Return what was added up."""
        rows = sorted(self._live.values(), key=lambda row: (-row[1][0], -row[1][1]))
        stacks = [LiveStack(row[0], row[1], row[2], lines) for lines, row in rows]
        rest = stacks[KEPT_STACKS:]
        groups = [SegmentGroup(*key, *counts) for key, counts in self._groups.items()]
        groups.sort(key=lambda group: -group.reserved_bytes)
        return DeviceMemory(
            index=self._index,
            segments=self._segments,
            blocks=self._blocks,
            reserved_bytes=sum(group.reserved_bytes for group in groups),
            allocated_bytes=sum(stack.bytes for stack in stacks),
            requested_bytes=self._requested,
            waiting_bytes=self._waiting,
            split_bytes=self._split,
            free_bytes=self._free,
            largest_free_bytes=max((group.largest_free_bytes for group in groups), default=0),
            private_pool_bytes=sum(group.live_bytes for group in groups if group.pool is not None),
            refusal=self._refusal(groups),
            refusals=len(self._ooms),
            earlier_refusals=tuple(self._refused(event) for event in self._ooms[:-1][:KEPT_REFUSALS]),
            later_events=len(self._since),
            is_later=self._is_later,
            events=self._events,
            groups=tuple(groups[:KEPT_GROUPS]),
            other_groups=len(groups[KEPT_GROUPS:]),
            stacks=tuple(stacks[:KEPT_STACKS]),
            other_stacks=len(rest),
            other_stacks_bytes=sum(stack.bytes for stack in rest),
        )


def _group(segment: dict[str, Any]) -> _Group:
    """Return what a segment shares with those that serve the same allocations."""
    pool, stream, kind = segment.get("segment_pool_id"), segment.get("stream"), segment.get("segment_type")
    is_pair = isinstance(pool, tuple) and len(pool) == 2 and all(type(part) is int for part in pool)
    return (
        (pool[0], pool[1]) if is_pair and pool != (0, 0) else None,  # type: ignore[index]
        stream if type(stream) is int else 0,
        {"large": True, "small": False}.get(kind) if isinstance(kind, str) else None,
        segment.get("is_expandable") is True,
    )


def _size(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < _MOST_BYTES:
        raise RefusedError(f"{what} {_told(value)}")
    return value


def _told(value: Any) -> str:
    """Return a wrong value as text; of what is no text and no number its type: all of it may be endless."""
    return (
        f"{value!r:.40}" if isinstance(value, (str, int, float)) or value is None else f"of type {type(value).__name__}"
    )


def _settings(raw: Any) -> str | None:
    """Return the allocator's options as they were set, "" for none; None where the snapshot does not tell them (torch 2.1 and older)."""
    if not isinstance(raw, dict):
        return None
    texts = [raw.get(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    told = next((text for text in texts if isinstance(text, str) and text), "")
    if not told and raw.get("expandable_segments") is True:
        return "expandable_segments:True"
    return told[:1000]


def _notes(devices: tuple[DeviceMemory, ...]) -> Iterator[str]:
    if not any(device.segments for device in devices):
        yield "the snapshot holds no segment: torch had no device memory when it was taken"
    elif not any(device.refusal for device in devices):
        events = sum(device.events for device in devices)
        yield (
            f"no out-of-memory event among the {events:,} recorded: it was taken before one, or without a history"
            if events
            else "no history was recorded (torch.cuda.memory._record_memory_history), so no allocation that failed is in it"
        )
    for device in devices:
        if device.is_later:
            yield (
                f"the blocks of device {device.index} are those of the dump, not those of the failure: the history since "
                f"(events: {device.later_events:,}) does not lead back; dump it before memory is freed, as guard(snapshot=FILE) does"
            )
    if any(device.stacks and not any(stack.frames for stack in device.stacks) for device in devices):
        yield "no Python stack was recorded for any live block: who allocated them is not known"
