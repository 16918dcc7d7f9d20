"""An allocation snapshot as an input: its last refused allocation becomes an incident, all of it
stays with the diagnosis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import IO, Any, Final

from oomguard.core.errors import InputError
from oomguard.core.facts import Fact, FactValue, format_gib
from oomguard.core.incident import Diagnosis, Evidence, Incident, Location, SettingInForce
from oomguard.core.snapshot_records import (
    DeviceMemory,
    Frame,
    LiveStack,
    Refusal,
    SegmentGroup,
    Snapshot,
)
from oomguard.rules.rule_files import RuleSet
from oomguard.scan.safe_pickle import (
    MOST_BYTES,
    MOST_CONTAINERS,
    CutOffError,
    RefusedError,
    check,
    load,
    without_collections,
)
from oomguard.scan.scan import scan
from oomguard.scan.source import Line, shown

# Figures of a snapshot that contradict each other: torch writes none, so a file that has them was
# changed, or was put together.


class Contradictions:
    """What does not fit, of all segments: only the first of a kind is named, the others are
    counted.
    """

    def __init__(self) -> None:
        self._begins: set[tuple[int, int]] = set()
        self._again: list[int] = []
        self._totals: list[str] = []
        self._other_totals = 0

    def is_again(self, device: int, segment: dict[str, Any], number: int) -> bool:
        """Return whether a segment at this address of this device was there before."""
        address = segment.get("address")
        if type(address) is not int or not address:
            return False
        if (device, address) in self._begins:
            self._again.append(number)
            return True
        self._begins.add((device, address))
        return False

    def compare(self, segment: dict[str, Any], blocks: list[Any], number: int) -> None:
        """Compare a segment's ``total_size``, where it has one, with its blocks; those of a wrong
        size are refused elsewhere.
        """
        sizes = [block.get("size") for block in blocks if type(block) is dict]
        held = sum(size for size in sizes if type(size) is int)
        total = segment.get("total_size", held)
        if type(total) is int and total == held:
            return
        if self._totals:
            self._other_totals += 1
            return
        if isinstance(total, float):
            told = f"{total:.40g}"
        else:
            told = f"of type {type(total).__name__}"
        if type(total) is int:
            if 0 <= total < 1 << 63:
                told = f"{total:,}"
            else:
                told = "no size"
        self._totals.append(
            f"segment {number} has the total_size {told}, and its blocks are {held:,} bytes"
        )

    def notes(self) -> Iterator[str]:
        """Yield a note for each kind that was found."""
        for told in self._totals:
            if self._other_totals:
                others = f" (so do {self._other_totals:,} more)"
            else:
                others = ""
            yield f"{told}{others}: the blocks are counted; was the file changed?"
        if self._again:
            if len(self._again) > 1:
                others = f" (so are {len(self._again) - 1:,} more)"
            else:
                others = ""
            yield (
                f"segment {self._again[0]} is at the address of an earlier one{others}: counted "
                "once; was the file changed?"
            )


# Which lines of a recorded stack tell a user something: their own code and the libraries', not
# torch's and not C++.

# How many lines of a stack are kept, and how many are looked at for them: stacks with C++ begin
# with dozens of its frames.
KEPT_FRAMES: Final = 6
_MOST_FRAMES: Final = 256
# Whole stacks that are known again at once; a program has thousands, a file may have any number.
_MOST_STACKS: Final = 20_000
_MOST_CHARS: Final = 300
_CPP: Final = ("??", ".cpp", ".pyx", ".cc", ".c", ".h", ".o", ".so", ".cu", ".cuh")
_BEGINS_INNER: Final = ("torch/", "<frozen ", "<string>", "<eval_with_key>")
_PACKAGES: Final = ("/site-packages/torch/", "/dist-packages/torch/")

_Lines = tuple[Frame, ...]


class Stacks:
    """The stacks of one snapshot, each as the few lines that tell something; equal stacks are one
    and the same tuple.

    torch notes the frames of a stack once and refers to them, so what was made of a frame is kept
    by the object's identity: the snapshot must be kept as long as this.
    """

    def __init__(self) -> None:
        self._frames: dict[int, Frame | None] = {}
        self._equal: dict[Frame, Frame] = {}
        self._stacks: dict[tuple[int, ...], _Lines] = {}
        self._read_stacks: dict[tuple[int, ...], _Lines] = {}

    def of(self, frames: Any) -> _Lines:
        """Return the lines of a recorded stack, innermost first; empty for what is no stack, or has
        nothing but torch in it.
        """
        if not frames or type(frames) is not list:
            return ()
        whole = tuple(map(id, frames if len(frames) <= _MOST_FRAMES else frames[:_MOST_FRAMES]))
        lines = self._read_stacks.get(whole)
        if lines is None:
            lines = self._lines(frames)
            if len(self._read_stacks) < _MOST_STACKS:
                self._read_stacks[whole] = lines
        return lines

    def _lines(self, frames: list[Any]) -> _Lines:
        known = self._frames
        kept = []
        for frame in frames[:_MOST_FRAMES]:
            key = id(frame)
            if key not in known:
                known[key] = self._read(frame)
            if (line := known[key]) is not None:
                kept.append(line)
                if len(kept) == KEPT_FRAMES:
                    break
        # Equal lines are one object, so their numbers tell a stack.
        key_of_stack = tuple(map(id, kept))
        return self._stacks.setdefault(key_of_stack, tuple(kept))

    def _read(self, frame: Any) -> Frame | None:
        """Return a frame as a line, None for one of torch's own, of C++, or of another shape."""
        read = _python_frame(frame)
        if read is None or _is_inner(read.file):
            return None
        return self._equal.setdefault(read, read)


def python_frames(frames: Any) -> _Lines:
    """Return the lines of a recorded stack that are Python, torch's own with them,
    innermost first.
    """
    if type(frames) is not list:
        return ()
    return tuple(
        read for frame in frames[:_MOST_FRAMES] if (read := _python_frame(frame)) is not None
    )


def _python_frame(frame: Any) -> Frame | None:
    if type(frame) is not dict:
        return None
    file = frame.get("filename")
    line = frame.get("line")
    name = frame.get("name")
    if (
        not isinstance(file, str)
        or not isinstance(name, str)
        or not file
        or file.endswith(_CPP)
        or "::" in name
    ):
        return None
    if isinstance(line, int) and 0 <= line < 1 << 31:
        number = line
    else:
        number = 0
    return Frame(file[-_MOST_CHARS:], number, name[:_MOST_CHARS])


def _is_inner(file: str) -> bool:
    """Return whether a file is torch's own, or Python's machinery."""
    return file.startswith(_BEGINS_INNER) or any(package in file for package in _PACKAGES)


# Take a device's blocks back to the moment at which its last allocation failed: what happened since
# is undone, the last event first.
#
# A program that dumps a snapshot where it handles the failure has freed memory by then. The history
# tells what, by address and size; the blocks of that moment follow where every event since can be
# undone.

# A segment with its blocks, as they stand in a snapshot.
Row = tuple[dict[str, Any], list[Any]]

# What is in a history and moves no memory; expandable segments that grew or shrank (segment_map,
# segment_unmap) are not undone.
_MOVES_NOTHING: Final = ("oom", "snapshot", "user_defined")
# Sizes are rounded up to it, and segments above the second serve large blocks: kMinBlockSize,
# kSmallBuffer of CUDACachingAllocator.cpp.
_ROUNDED_BYTES: Final = 512
_SMALL_SEGMENT_BYTES: Final = 2 << 20


class _LostError(Exception):
    """An event that does not fit the blocks: they cannot be taken back beyond it."""


def events_since_refusal(trace: list[Any]) -> list[tuple[dict[str, Any], Any]]:
    """Return the events after the last refusal that moved memory, each with the stack that
    allocated its block, as far as it is known.
    """
    last = max(
        (at for at, event in enumerate(trace) if _action(event) == "oom"), default=len(trace)
    )
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


def rewound(
    rows: Iterable[Row], since: list[tuple[dict[str, Any], Any]], device: int
) -> list[Row] | None:
    """Return the segments of a device, with their blocks, as they were before these events; None
    where they do not lead back.
    """
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
        action = _action(event)
        address = _number(event.get("addr"))
        size = _number(event.get("size"))
        block = self._blocks.get(address)
        is_live = block is not None and block.get("state") == "active_allocated"
        if action == "alloc" and is_live:
            del self._blocks[address]
        elif action == "free_requested" and block is not None and not is_live:
            self._blocks[address] = {**block, "state": "active_allocated"}
        elif action == "free_completed" and block is None:
            rounded = max(_ROUNDED_BYTES, -(-size // _ROUNDED_BYTES) * _ROUNDED_BYTES)
            waiting = {
                "size": rounded,
                "requested_size": size,
                "state": "active_pending_free",
                "frames": frames,
            }
            self._blocks[address] = waiting
        elif action == "segment_alloc" and self._segments.get(address, (None, -1))[1] == size:
            del self._segments[address]
        elif action == "segment_free" and address not in self._segments:
            if size > _SMALL_SEGMENT_BYTES:
                kind = "large"
            else:
                kind = "small"
            about = {
                "device": self._device,
                "address": address,
                "stream": event.get("stream"),
                "segment_type": kind,
            }
            self._segments[address] = about, size
        else:
            raise _LostError

    def rows(self) -> Iterator[Row]:
        """Yield the segments with their blocks, the free ones between those in use with them; every
        block must lie in a segment.
        """
        addresses = sorted(self._blocks, reverse=True)
        for begin, (segment, size) in sorted(self._segments.items(), key=lambda item: item[0]):
            at = begin
            end = begin + size
            blocks = []
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
    if size:
        return [{"size": size, "state": "inactive"}]
    return []


def _action(event: Any) -> str | None:
    if type(event) is dict:
        action = event.get("action")
    else:
        action = None
    if isinstance(action, str):
        return action
    return None


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST_BYTES:
        raise _LostError
    return value


# Sum up what ``torch.cuda.memory._snapshot()`` returns, of torch 2.0 to 2.13: segments, blocks,
# stacks, the last refusal.
#
# The forms differ: 2.0 keeps a block's stack in its ``history``, pools have ids since 2.1,
# expandable segments are told since 2.2, a block that waits is ``active_pending_free`` in what is
# dumped and ``active_awaiting_free`` in the documentation. What a version does not tell is None
# here. Every list is walked once: a file that refers to one list a thousand times is refused.

KEPT_STACKS: Final = 20
KEPT_GROUPS: Final = 50
KEPT_REFUSALS: Final = 20
# Blocks of an allocation above it are large: kSmallSize of c10/core/AllocatorConfig.h, torch 2.1 to
# 2.13.
_SMALL_BYTES: Final = 1 << 20
_LIVE: Final = "active_allocated"
_WAITING: Final = (
    "active_pending_free",
    "active_awaiting_free",
)  # no set: a wrong state may be a list
_FREE: Final = "inactive"
_MOST_BYTES: Final = 1 << 60
_MOST_DEVICES: Final = 1024
_NO_SEGMENTS: Final = "it is a pickle, but no allocation snapshot: it has no segments"

_Group = tuple[tuple[int, int] | None, int, bool | None, bool]


def summarize(raw: Any) -> Snapshot:
    """Return a snapshot's summary.

    Raises:
        RefusedError: it is no snapshot, or not as torch writes one; the text says what is wrong in
            it.
    """
    if not isinstance(raw, dict) or not isinstance(raw.get("segments"), list):
        raise RefusedError(_NO_SEGMENTS)
    once = _Once()
    stacks = Stacks()
    odd = Contradictions()
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
    return Snapshot(
        devices, _settings(raw.get("allocator_settings")), (*odd.notes(), *_notes(devices))
    )


class _Once:
    """Refuses a list or a dict that comes a second time, and more entries than dicts: shared, a
    small file could be walked without end.
    """

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
        self._index = index
        self._stacks = stacks
        self._segments = self._blocks = self._requested = self._waiting = self._split = (
            self._free
        ) = 0
        self._groups: dict[_Group, list[int]] = {}
        self._live: dict[int, tuple[tuple[Frame, ...], list[int]]] = {}
        self._ooms: list[dict[str, Any]] = []
        self._since: list[tuple[dict[str, Any], Any]] = []
        self._events = 0
        self._is_later = False

    def at_refusal(self, rows: list[Row]) -> list[Row]:
        """Return the segments as they were when the last allocation failed; as they were dumped
        where the history does not lead back.
        """
        if not self._since:
            return rows
        past = rewound(rows, self._since, self._index)
        self._is_later = past is None
        if past is None:
            return rows
        return past

    def add(self, segment: dict[str, Any], blocks: list[Any], number: int) -> None:
        """Add one segment with its blocks."""
        group = self._groups.setdefault(_group(segment), [0, 0, 0, 0, 0, 0])
        live = waiting = free = largest = count = 0
        for block in blocks:
            if type(block) is not dict:
                raise RefusedError(f"a block of segment {number} is no dict")
            size = block.get("size")
            state = block.get("state")
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
        requested = block.get("requested_size")
        frames = block.get("frames")
        history = block.get("history")
        if (
            frames is None and type(history) is list and history and type(history[0]) is dict
        ):  # torch 2.0
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
        """Look for refusals in the recorded history, and for what happened after the last one,
        which counts.
        """
        self._events = len(trace)
        self._ooms = [
            event for event in trace if type(event) is dict and event.get("action") == "oom"
        ]
        if self._ooms:
            self._since = events_since_refusal(trace)
        else:
            self._since = []

    def _refusal(self, groups: list[SegmentGroup]) -> Refusal | None:
        """Return the last allocation that failed, with what was free where it could have been
        placed, as far as that is known.
        """
        if not self._ooms:
            return None
        refusal = self._refused(self._ooms[-1])
        stream = self._ooms[-1].get("stream")
        if self._is_later:
            return refusal
        stream = stream if type(stream) is int else 0
        is_large = refusal.tried_bytes > _SMALL_BYTES
        usable = [
            g
            for g in groups
            if g.pool is None and g.stream == stream and g.is_large in {None, is_large}
        ]
        return replace(
            refusal,
            free_blocks_bytes=sum(group.free_bytes for group in usable),
            largest_free_bytes=max((group.largest_free_bytes for group in usable), default=0),
            waiting_blocks_bytes=sum(group.waiting_bytes for group in usable),
        )

    def _refused(self, event: dict[str, Any]) -> Refusal:
        tried = _size(event.get("size"), "its out-of-memory event has the size")
        free = event.get("device_free")
        frames = event.get("frames")
        if type(free) is int and 0 <= free < _MOST_BYTES:
            known_free = free
        else:
            known_free = None
        return Refusal(
            tried, known_free, frames=self._stacks.of(frames), traceback=python_frames(frames)
        )

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
            earlier_refusals=tuple(
                self._refused(event) for event in self._ooms[:-1][:KEPT_REFUSALS]
            ),
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
    pool = segment.get("segment_pool_id")
    stream = segment.get("stream")
    kind = segment.get("segment_type")
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
    """Return a wrong value as text; of what is no text and no number its type: all of it may be
    endless.
    """
    if isinstance(value, (str, int, float)) or value is None:
        return f"{value!r:.40}"
    return f"of type {type(value).__name__}"


def _settings(raw: Any) -> str | None:
    """Return the allocator's options as they were set, "" for none; None where the snapshot does
    not tell them (torch 2.1 and older).
    """
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
            f"no out-of-memory event among the {events:,} recorded: it was taken before one, or "
            "without a history"
            if events
            else (
                "no history was recorded (torch.cuda.memory._record_memory_history), so no "
                "allocation that failed is in it"
            )
        )
    for device in devices:
        if device.is_later:
            yield (
                f"the blocks of device {device.index} are those of the dump, not those of the "
                "failure: the history since "
                f"(events: {device.later_events:,}) does not lead back; dump it before memory is "
                "freed, as guard(snapshot=FILE) does"
            )
    if any(
        device.stacks and not any(stack.frames for stack in device.stacks) for device in devices
    ):
        yield "no Python stack was recorded for any live block: who allocated them is not known"


_SOURCE: Final = "measured"
_SHOWN_FRAMES: Final = 3
_BLOCK_BYTES: Final = 16 << 20
_HINT: Final = (
    "nothing in it was run; of pickles only what torch.cuda.memory._dump_snapshot writes is read"
)


def read_snapshot(
    stream: IO[bytes], source: str, rules: RuleSet, given: Mapping[str, Fact] | None = None
) -> Diagnosis:
    """Return what a snapshot says, not yet explained: an incident for each device that refused an
    allocation.

    Args:
        stream: the input, unpacked.
        source: the path as the user gave it.
        rules: the rules in force, which know engines and phases by their lines.
        given: facts that the user gives: the size of the device.

    Raises:
        InputError: it is another pickle, a damaged or a hostile one; nothing in it was run. Or it
            holds more than the device that is given.
    """
    if source:
        name = f"{shown(source)}: "
    else:
        name = ""
    try:
        with without_collections():
            snapshot = summarize(load(_whole(stream)))
    except RefusedError as error:
        raise InputError(f"{name}not read as an allocation snapshot: {error}", hint=_HINT) from None
    _check_size((given or {}).get("device_total_bytes"), snapshot, name)
    incidents = tuple(
        _incident(device, snapshot, rules)
        for device in snapshot.devices
        if device.refusal is not None
    )
    return Diagnosis(source, incidents, snapshot.notes, snapshot=snapshot)


def _check_size(given: Fact | None, snapshot: Snapshot, name: str) -> None:
    """Refuse a given size of the device that is less than what torch held of one and what was free
    on it then.
    """
    for device in snapshot.devices if given is not None else ():
        if device.refusal is None or device.is_later:
            free = None
        else:
            free = device.refusal.device_free_bytes
        least = device.reserved_bytes + (free or 0)
        assert given is not None  # noqa: S101 - else there is no device here
        if int(given.value) < least:
            if free:
                beside = f", with {format_gib(free)} free beside it"
            else:
                beside = ""
            raise InputError(
                f"{name}the device's memory is given as {format_gib(int(given.value))}, and torch "
                "held "
                f"{format_gib(device.reserved_bytes)} of device {device.index}{beside}",
                hint=f"give its total memory, {-(-least >> 20)}MiB or more, or leave it out",
            )


def _whole(stream: IO[bytes]) -> bytes:
    """Return the input's bytes, one more than may be read at most; a first block that is refused is
    all that is read.
    """
    parts = []
    size = 0
    if first := stream.read(_BLOCK_BYTES):
        with contextlib.suppress(CutOffError):
            check(first)
        parts = [first]
        size = len(first)
    while size <= MOST_BYTES and (more := stream.read(_BLOCK_BYTES)):
        parts.append(more)
        size += len(more)
    return b"".join(parts)


def _incident(device: DeviceMemory, snapshot: Snapshot, rules: RuleSet) -> Incident:
    refusal = device.refusal
    assert refusal is not None  # noqa: S101 - as the caller asked
    seen = _seen_in(refusal.traceback, rules)
    facts = {name: replace(fact, source=_SOURCE, line=None) for name, fact in seen.facts.items()}
    facts |= {name: Fact(name, value, _SOURCE) for name, value in _figures(device)}
    lines = tuple(Evidence(_printed(frame)) for frame in refusal.frames)
    settings = {}
    if snapshot.settings:
        settings["allocator_options"] = SettingInForce(
            "allocator_options", snapshot.settings, True, _SOURCE
        )
    if device.refusals > 1:
        times = f", the last of {device.refusals}"
    else:
        times = ""
    return Incident(
        "cuda_oom",
        f"an allocation of {refusal.tried_bytes} bytes failed on device {device.index}{times}",
        framework=seen.framework,
        phase=seen.phase,
        location=Location(process=f"device {device.index}"),
        facts=MappingProxyType(facts),
        settings=MappingProxyType(settings),
        evidence=lines,
    )


def _seen_in(traceback: tuple[Frame, ...], rules: RuleSet) -> Incident:
    """Return what the stack of a refused allocation tells, read as the traceback that torch's
    exception prints.
    """
    frames = [_printed(frame) for frame in reversed(traceback)]
    texts = [
        "Traceback (most recent call last):",
        *frames,
        "torch.OutOfMemoryError: CUDA out of memory.",
    ]
    found = scan((Line(number, 0, text) for number, text in enumerate(texts, 1)), rules).first_cause
    return found or Incident("cuda_oom", "", framework="torch")


def _printed(frame: Frame) -> str:
    return f'  File "{frame.file}", line {frame.line}, in {frame.function}'


def _figures(device: DeviceMemory) -> Iterator[tuple[str, FactValue]]:
    """Yield the facts of a refused allocation, by the names that a printed message gives them."""
    refusal = device.refusal
    assert refusal is not None  # noqa: S101 - as the caller asked
    yield "gpu_index", device.index
    yield "tried_bytes", refusal.tried_bytes
    if refusal.device_free_bytes is not None:
        yield "device_free_bytes", refusal.device_free_bytes
    if device.is_later:  # what is in use and free is of another moment
        return
    yield "allocated_bytes", device.allocated_bytes
    yield "reserved_total_bytes", device.reserved_bytes
    yield "reserved_unallocated_bytes", device.reserved_bytes - device.allocated_bytes
    blocks = {
        "free_blocks_bytes": refusal.free_blocks_bytes,
        "largest_free_block_bytes": refusal.largest_free_bytes,
        "waiting_blocks_bytes": refusal.waiting_blocks_bytes or None,
    }
    yield from ((name, value) for name, value in blocks.items() if value is not None)
    if device.stacks and device.stacks[0].frames:
        yield (
            "largest_holder",
            " < ".join(str(frame) for frame in device.stacks[0].frames[:_SHOWN_FRAMES]),
        )
        yield "largest_holder_bytes", device.stacks[0].bytes
    if device.private_pool_bytes:
        yield "private_pool_bytes", device.private_pool_bytes
