"""Read an allocation snapshot: its last refused allocation becomes an incident.

The diagnosis keeps the summary of the whole snapshot. The first part reads the pickle, of which it
loads plain data only.
"""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import IO, Any, Final

from oomguard.core.errors import InputError
from oomguard.core.facts import Fact, FactValue, format_gib
from oomguard.core.incident import Diagnosis, Evidence, Incident, Location, SettingInForce
from oomguard.core.measurements import (
    DeviceMemory,
    Frame,
    LiveStack,
    Refusal,
    SegmentGroup,
    Snapshot,
)
from oomguard.rules.rule_files import RuleSet
from oomguard.scan.scan import scan
from oomguard.scan.source import Line, printable_path

# A pickle is a program, so every instruction in it is checked before it is loaded.
#
# torch's dumps need few instructions: those for dicts, lists, texts and numbers. A regular
# expression accepts these at the speed of ``re``. The first other instruction is rejected by name
# and never runs. So nothing looks up a name, creates or calls an object, or allocates a size that
# the file only claims.

# A history of 100,000 events is about 25 MB. A file's bytes limit its memory, and so do its dicts
# and lists at one byte each: an empty dict takes 64 bytes of memory.
MOST_PICKLE_BYTES: Final = 512 << 20
MOST_CONTAINERS: Final = 16_000_000

_STOP = 0x2E
_FRAME = 0x95
_SHORT_TEXT = 0x8C
_TEXT = 0x58
_LONG_PUT = 0x72
_LONG: Final = b"|".join(b"\\x%02x" % size + b"." * size for size in range(10))
_INT: Final = rb"(?:K.|M..|J....|\x8a(?:" + _LONG + rb"))"
# A run of instructions with a fixed length: references to earlier objects; dicts, lists, marks,
# None and booleans; integers up to nine bytes, pairs of them (a pool's id) and floats. No other
# tuples, because the hash of nested ones may never end or may exhaust the stack. Dots instead of
# {4} and the most frequent ones first make it a third faster.
_RUN: Final = re.compile(
    rb"(?s:j....|[\x94(ue}\]Nas)\x88\x89]|[hq].|" + _INT + rb"(?:" + _INT + rb"\x86)?|G........)*+"
)
# Instructions with an argument, and the maximum of its bytes including the instruction.
_WITH_ARGUMENT: Final = b"KMJGhjqr\x8a"
_MOST_ARGUMENT_BYTES: Final = 11
_BEGINS: Final = re.compile(rb"\x80[\x00-\x1f]")
_NAME: Final = re.compile(rb"([^\n]{0,200})\n([^\n]{0,200})\n")
_SMALLER: Final = "record fewer events with _record_memory_history(max_entries=100_000)"
_SHOWN_BYTES: Final = 200
_LOOKED_AT_BYTES: Final = 64 << 10


class RefusedError(Exception):
    """Report a rejected pickle; the text says why, and what it would have run."""


class CutOffError(RefusedError):
    """Report a pickle that ends early; up to there it is plain data."""

    def __init__(self) -> None:
        super().__init__("it is truncated")


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable the cyclic garbage collector, which would traverse millions of new objects."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def load_pickle(data: bytes) -> Any:
    """Return the plain data in a pickle: dicts, lists, texts, numbers, None.

    Raises:
        RefusedError: it has other content, is truncated or damaged, or would need more memory than
            any snapshot.
    """
    check_pickle(data)
    try:
        return _Plain(io.BytesIO(data)).load()
    except RefusedError:
        raise
    except MemoryError:
        raise RefusedError("it does not fit in this machine's memory") from None
    except Exception as error:  # noqa: BLE001
        # A damaged pickle raises any exception, and all mean the same.
        raise RefusedError(f"it is damaged: {error or type(error).__name__}") from None


class _Plain(pickle.Unpickler):
    """Reject imports and references as a second check after ``check``."""

    def find_class(self, module: str, name: str) -> Any:
        raise RefusedError(f"it would import {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise RefusedError("it refers to an object outside itself")


def check_pickle(data: bytes) -> None:
    """Check every instruction of a pickle.

    Raises:
        RefusedError: at the first instruction that plain data does not need.
    """
    if len(data) > MOST_PICKLE_BYTES:
        raise RefusedError(f"it has more than {MOST_PICKLE_BYTES >> 20} MiB: {_SMALLER}")
    if not _BEGINS.match(data):
        raise RefusedError(
            f"its protocol is 0 or 1, which torch does not write{_wanted_by_old(data)}"
        )
    if data[1] not in range(2, 6):
        raise RefusedError(f"its protocol is {data[1]}, but oomguard reads 2 to 5")
    if data.count(b"}") + data.count(b"]") > MOST_CONTAINERS:
        raise RefusedError(f"it may hold more than {MOST_CONTAINERS:,} dicts and lists: {_SMALLER}")
    at = 2
    texts = (b"", b"")
    while True:
        run = _RUN.match(data, at)
        assert run is not None  # noqa: S101 - an empty run matches too
        at = run.end()
        if at >= len(data):
            raise CutOffError
        if data[at] == _STOP:
            return
        argument = _argument(data, at)
        if (
            argument is None
            and data[at] in _WITH_ARGUMENT
            and len(data) - at < _MOST_ARGUMENT_BYTES
        ):
            raise CutOffError
        if argument is None:
            raise RefusedError(_named(data, at, texts))
        begin, size = argument
        if begin + size > len(data):
            raise CutOffError
        if data[at] in {_SHORT_TEXT, _TEXT}:
            texts = (texts[1], data[begin : begin + min(size, _SHOWN_BYTES)])
        at = begin + size


def _argument(data: bytes, at: int) -> tuple[int, int] | None:
    """Return the start and length of the argument of a text, frame or memo, or None."""
    code = data[at]
    number = int.from_bytes(data[at + 1 : at + 5], "little")
    if code == _SHORT_TEXT:
        return at + 2, number & 0xFF
    if code == _TEXT:
        return at + 5, number
    if code == _FRAME:
        return at + 9, 0
    # A memo number above the number of objects so far would allocate everything below it.
    if code == _LONG_PUT and number <= at:
        return (at + 5, 0)
    return None


def _named(data: bytes, at: int, texts: tuple[bytes, bytes]) -> str:
    """Return which instruction is rejected and what it would run, if known."""
    import pickletools  # only a rejected pickle needs it

    found = next((op for op in pickletools.opcodes if op.code == chr(data[at])), None)
    if found is None:
        return f"byte {at} is not an instruction of a pickle"
    where = f"{found.name} at byte {at}"
    if found.name in {"GLOBAL", "INST"} and (name := _NAME.match(data, at + 1)):
        return f"it would import {_text(name[1])}.{_text(name[2])} ({where})"
    if found.name == "STACK_GLOBAL":
        names = ".".join(_text(text) for text in texts if text)
        return f"it would import {names or 'a name'} ({where})"
    if found.name in {"EXT1", "EXT2", "EXT4"}:
        return f"it needs an object from the copyreg registry ({where})"
    return f"it contains {where}, which plain data does not need"


def _wanted_by_old(data: bytes) -> str:
    """Return the first import of a protocol 0 or 1 pickle, or the next step if there is none."""
    for name, argument in old_instructions(data[:_LOOKED_AT_BYTES]):
        if name in {"GLOBAL", "INST"}:
            return f", and it would import {'.'.join(str(argument).split(' ', 1))[:401]}"
    return ": it writes 2 and newer; dump it again"


def old_instructions(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield a headerless pickle's instructions with arguments, up to the first invalid one."""
    import pickletools  # only a rejected pickle needs it

    with suppress(ValueError):  # also for an impossible number or text
        for instruction, argument, _at in pickletools.genops(data):
            yield instruction.name, argument


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


# torch writes no contradictory numbers, so a file with them was changed or assembled.


class Contradictions:
    """Count contradictions in all segments; the first one of each kind gets a name."""

    def __init__(self) -> None:
        self._begins: set[tuple[int, int]] = set()
        self._again: list[int] = []
        self._totals: list[str] = []
        self._other_totals = 0

    def is_again(self, device: int, segment: dict[str, Any], number: int) -> bool:
        """Return whether an earlier segment of this device has the same address."""
        address = segment.get("address")
        if type(address) is not int or not address:
            return False
        if (device, address) in self._begins:
            self._again.append(number)
            return True
        self._begins.add((device, address))
        return False

    def compare(self, segment: dict[str, Any], blocks: list[Any], number: int) -> None:
        """Compare a segment's ``total_size`` with its blocks, if it has one.

        Blocks of a wrong size are rejected elsewhere.
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
            f"segment {number} has the total_size {told}, but its blocks have {held:,} bytes"
        )

    def notes(self) -> Iterator[str]:
        """Yield a note for each kind of contradiction."""
        for told in self._totals:
            if self._other_totals:
                others = f" (so do {self._other_totals:,} more)"
            else:
                others = ""
            yield f"{told}{others}: oomguard counts the blocks; the file may have been changed"
        if self._again:
            if len(self._again) > 1:
                others = f" (so do {len(self._again) - 1:,} more)"
            else:
                others = ""
            yield (
                f"segment {self._again[0]} has the address of an earlier one{others}: "
                "oomguard counts it once; the file may have been changed"
            )


# Users need the frames of their own code and of libraries, not torch's or C++ ones.

# The frames to keep of a stack, and the frames to search for them: stacks with C++ begin with
# dozens of its frames.
KEPT_FRAMES: Final = 6
_MOST_FRAMES: Final = 256
# The cache of whole stacks; a program has thousands, a file may have any number.
_MOST_STACKS: Final = 20_000
_MOST_CHARS: Final = 300
_CPP: Final = ("??", ".cpp", ".pyx", ".cc", ".c", ".h", ".o", ".so", ".cu", ".cuh")
_BEGINS_INNER: Final = ("torch/", "<frozen ", "<string>", "<eval_with_key>")
_PACKAGES: Final = ("/site-packages/torch/", "/dist-packages/torch/")

_Lines = tuple[Frame, ...]


class Stacks:
    """Shorten the stacks of one snapshot to useful lines; equal stacks share one tuple.

    torch stores each frame once and refers to it, so the cache uses the identity of objects: the
    snapshot must live as long as this.
    """

    def __init__(self) -> None:
        self._frames: dict[int, Frame | None] = {}
        self._equal: dict[Frame, Frame] = {}
        self._stacks: dict[tuple[int, ...], _Lines] = {}
        self._read_stacks: dict[tuple[int, ...], _Lines] = {}

    def of(self, frames: Any) -> _Lines:
        """Return the lines of a stack, innermost first.

        It is empty for an invalid stack or one with only torch's frames.
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
        # Equal lines are one object, so their ids identify a stack.
        key_of_stack = tuple(map(id, kept))
        return self._stacks.setdefault(key_of_stack, tuple(kept))

    def _read(self, frame: Any) -> Frame | None:
        """Return a frame as a line, or None for torch, C++ or an invalid one."""
        read = _python_frame(frame)
        if read is None or _is_inner(read.file):
            return None
        return self._equal.setdefault(read, read)


def python_frames(frames: Any) -> _Lines:
    """Return the Python lines of a stack, including torch's own, innermost first."""
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
    """Return whether a file belongs to torch or Python itself."""
    return file.startswith(_BEGINS_INNER) or any(package in file for package in _PACKAGES)


# Restore a device's blocks at its last failed allocation by undoing later events, the last one
# first.
#
# A program that dumps a snapshot while handling the failure has already freed memory. The history
# has that by address and size. If every later event can be undone, the result is exact.

# A segment with its blocks, as in a snapshot.
Row = tuple[dict[str, Any], list[Any]]

# History entries that move no memory. Growing or shrinking expandable segments (segment_map,
# segment_unmap) cannot be undone.
_MOVES_NOTHING: Final = ("oom", "snapshot", "user_defined")
# Sizes are rounded up to this, and segments above the second one are for large blocks:
# kMinBlockSize, kSmallBuffer of CUDACachingAllocator.cpp.
_ROUNDED_BYTES: Final = 512
_SMALL_SEGMENT_BYTES: Final = 2 << 20


class _LostError(Exception):
    """Report an event that does not fit the blocks, so earlier states are unknown."""


def events_since_refusal(trace: list[Any]) -> list[tuple[dict[str, Any], Any]]:
    """Return the memory events after the last refusal, with the stack of their block if known."""
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


def rewind(
    rows: Iterable[Row], since: list[tuple[dict[str, Any], Any]], device: int
) -> list[Row] | None:
    """Return a device's segments and blocks before these events, or None if that fails."""
    try:
        past = _Past(rows, device)
        for event, frames in reversed(since):
            past.undo(event, frames)
        return list(past.rows())
    except _LostError:
        return None


class _Past:
    """Hold the used blocks and segments by address; the space between blocks is free."""

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
        """Yield the segments with used and free blocks; every block must be in a segment."""
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
    if type(value) is not int or not 0 <= value < _MOST_SIZE:
        raise _LostError
    return value


# Summarize ``torch.cuda.memory._snapshot()`` of torch 2.0 to 2.13: segments, blocks, stacks, and
# the last refusal.
#
# The forms differ: 2.0 stores a block's stack in its ``history``, pools have ids since 2.1,
# expandable segments are marked since 2.2. A waiting block is ``active_pending_free`` in the dump
# and ``active_awaiting_free`` in the documentation. Values that a version does not have are None.
# Each list is read once: a file with a thousand references to one list is rejected.

KEPT_STACKS: Final = 20
KEPT_GROUPS: Final = 50
KEPT_REFUSALS: Final = 20
# Larger allocations use large blocks: kSmallSize of c10/core/AllocatorConfig.h, torch 2.1 to 2.13.
_SMALL_BYTES: Final = 1 << 20
_LIVE: Final = "active_allocated"
_WAITING: Final = (
    "active_pending_free",
    "active_awaiting_free",
)  # not a set, because an invalid state may be a list
_FREE: Final = "inactive"
_MOST_SIZE: Final = 1 << 60
_MOST_DEVICES: Final = 1024
_NO_SEGMENTS: Final = "it is a pickle, but no allocation snapshot: it has no segments"

_Group = tuple[tuple[int, int] | None, int, bool | None, bool]


def summarize(raw: Any) -> Snapshot:
    """Return a snapshot's summary.

    Raises:
        RefusedError: it is not a snapshot, or torch would not write it; the text says what is
            wrong.
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
            raise RefusedError(f"its segment {number} is not a dict")
        index = _size(segment.get("device", 0), f"segment {number} has the device")
        if odd.is_again(index, segment, number):  # a copy, or the same object: do not read it again
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
    """Reject a list or dict that occurs twice, and too many entries.

    With shared objects a small file could take forever.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._entries = 0

    def take(self, value: Any, name: str) -> None:
        if id(value) in self._seen:
            raise RefusedError(f"its {name} occurs twice")
        self._seen.add(id(value))

    def items(self, value: Any, name: str) -> list[Any]:
        if not isinstance(value, list):
            raise RefusedError(f"its {name} is not a list")
        if value:
            self.take(value, name)
        self._entries += len(value)
        if self._entries > MOST_CONTAINERS:
            raise RefusedError(f"its lists have more than {MOST_CONTAINERS:,} entries")
        return value


class _Device:
    """Add up the segments and the history of one device."""

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
        """Return the segments at the last failed allocation.

        If the history does not lead back, they are those of the dump.
        """
        if not self._since:
            return rows
        past = rewind(rows, self._since, self._index)
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
                raise RefusedError(f"a block of segment {number} is not a dict")
            size = block.get("size")
            state = block.get("state")
            if type(size) is not int or not 0 <= size < _MOST_SIZE:
                raise RefusedError(f"a block of segment {number} has the size {_value_text(size)}")
            if state == _LIVE:
                live += size
                self._allocate(block, size)
            elif state == _FREE:
                free += size
                largest = max(largest, size)
            elif state in _WAITING:
                waiting += size
            else:
                raise RefusedError(
                    f"a block of segment {number} has the state {_value_text(state)}"
                )
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
        """Find refusals in the history, and the events after the last one."""
        self._events = len(trace)
        self._ooms = [
            event for event in trace if type(event) is dict and event.get("action") == "oom"
        ]
        if self._ooms:
            self._since = events_since_refusal(trace)
        else:
            self._since = []

    def _refusal(self, groups: list[SegmentGroup]) -> Refusal | None:
        """Return the last failed allocation, with the free memory for it if known."""
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
        if type(free) is int and 0 <= free < _MOST_SIZE:
            known_free = free
        else:
            known_free = None
        return Refusal(
            tried, known_free, frames=self._stacks.of(frames), traceback=python_frames(frames)
        )

    def summary(self) -> DeviceMemory:
        """Return the sums."""
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
    """Return the key of segments that serve the same allocations."""
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
    if type(value) is not int or not 0 <= value < _MOST_SIZE:
        raise RefusedError(f"{what} {_value_text(value)}")
    return value


def _value_text(value: Any) -> str:
    """Return an invalid value as text; for other types only the type's name.

    The value itself may be endless.
    """
    if isinstance(value, (str, int, float)) or value is None:
        return f"{value!r:.40}"
    return f"of type {type(value).__name__}"


def _settings(raw: Any) -> str | None:
    """Return the allocator's options, "" for none; None if unknown (torch 2.1 and older)."""
    if not isinstance(raw, dict):
        return None
    texts = [raw.get(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    told = next((text for text in texts if isinstance(text, str) and text), "")
    if not told and raw.get("expandable_segments") is True:
        return "expandable_segments:True"
    return told[:1000]


def _notes(devices: tuple[DeviceMemory, ...]) -> Iterator[str]:
    if not any(device.segments for device in devices):
        yield "the snapshot has no segment: torch had no device memory at that time"
    elif not any(device.refusal for device in devices):
        events = sum(device.events for device in devices)
        yield (
            (
                f"none of the {events:,} recorded events is an out-of-memory: the snapshot is "
                "from before one, or without a history"
            )
            if events
            else (
                "without a recorded history (torch.cuda.memory._record_memory_history) a "
                "snapshot has no failed allocation"
            )
        )
    for device in devices:
        if device.is_later:
            yield (
                f"the blocks of device {device.index} are those of the dump, not of the "
                "failure, because the history since then (events: "
                f"{device.later_events:,}) does not lead back; dump it before memory is "
                "freed, as guard(snapshot=FILE) does"
            )
    if any(
        device.stacks and not any(stack.frames for stack in device.stacks) for device in devices
    ):
        yield "no live block has a Python stack, so it is unknown who allocated them"


_SOURCE: Final = "measured"
_SHOWN_FRAMES: Final = 3
_BLOCK_BYTES: Final = 16 << 20
_HINT: Final = (
    "oomguard ran nothing in it; among pickles it only reads files from "
    "torch.cuda.memory._dump_snapshot"
)


def read_snapshot(
    stream: IO[bytes], source: str, rules: RuleSet, given: Mapping[str, Fact] | None = None
) -> Diagnosis:
    """Return the incidents of a snapshot without explanation: one per device with a refusal.

    Args:
        stream: the unpacked input.
        source: the path as the user gave it.
        rules: the rules, which recognize engines and phases by their lines.
        given: the user's facts: the size of the device.

    Raises:
        InputError: it is another pickle, a damaged or a hostile one, of which nothing ran; or it
            has more memory than the given device.
    """
    if source:
        name = f"{printable_path(source)}: "
    else:
        name = ""
    try:
        with without_collections():
            snapshot = summarize(load_pickle(_whole(stream)))
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
    """Reject a given device size below torch's memory plus the free memory."""
    for device in snapshot.devices if given is not None else ():
        if device.refusal is None or device.is_later:
            free = None
        else:
            free = device.refusal.device_free_bytes
        least = device.reserved_bytes + (free or 0)
        assert given is not None  # noqa: S101 - else there is no device here
        if int(given.value) < least:
            if free:
                beside = f", with {format_gib(free)} free in addition"
            else:
                beside = ""
            raise InputError(
                f"{name}the given device memory is {format_gib(int(given.value))}, but "
                f"torch had {format_gib(device.reserved_bytes)} of device "
                f"{device.index}{beside}",
                hint=f"give its total memory, {-(-least >> 20)}MiB or more, or omit it",
            )


def _whole(stream: IO[bytes]) -> bytes:
    """Return the input's bytes, up to one above the limit, or only the first block if rejected."""
    parts = []
    size = 0
    if first := stream.read(_BLOCK_BYTES):
        with contextlib.suppress(CutOffError):
            check_pickle(first)
        parts = [first]
        size = len(first)
    while size <= MOST_PICKLE_BYTES and (more := stream.read(_BLOCK_BYTES)):
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
    """Return the facts of a refused allocation's stack, read like a printed traceback."""
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
    """Yield the facts of a refused allocation, under the names of printed messages."""
    refusal = device.refusal
    assert refusal is not None  # noqa: S101 - as the caller asked
    yield "gpu_index", device.index
    yield "tried_bytes", refusal.tried_bytes
    if refusal.device_free_bytes is not None:
        yield "device_free_bytes", refusal.device_free_bytes
    if device.is_later:  # later numbers belong to another moment
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
