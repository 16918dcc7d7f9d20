"""An allocation snapshot as an input: its last refused allocation becomes an incident, all of it stays with the diagnosis."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import IO, Final

from oomguard.errors import InputError
from oomguard.facts import Fact, FactValue, format_gib
from oomguard.incident import Diagnosis, Evidence, Incident, Location, SettingInForce
from oomguard.observe.scan import scan
from oomguard.observe.source import Line, shown
from oomguard.rules.load import RuleSet
from oomguard.snapshots.pickled import MOST_BYTES, CutOffError, RefusedError, check, load, without_collections
from oomguard.snapshots.records import DeviceMemory, Frame, Snapshot
from oomguard.snapshots.summary import summarize

_SOURCE: Final = "measured"
_SHOWN_FRAMES: Final = 3
_BLOCK_BYTES: Final = 16 << 20
_HINT: Final = "nothing in it was run; of pickles only what torch.cuda.memory._dump_snapshot writes is read"


def read_snapshot(stream: IO[bytes], source: str, rules: RuleSet, given: Mapping[str, Fact] | None = None) -> Diagnosis:
    """Return what a snapshot says, not yet explained: an incident for each device that refused an allocation.

    Args:
        stream: the input, unpacked.
        source: the path as the user gave it.
        rules: the rules in force, which know engines and phases by their lines.
        given: facts that the user gives: the size of the device.

    Raises:
        InputError: it is another pickle, a damaged or a hostile one; nothing in it was run. Or it holds more than the device that is
            given.
    """
    name = f"{shown(source)}: " if source else ""
    try:
        with without_collections():
            snapshot = summarize(load(_whole(stream)))
    except RefusedError as error:
        raise InputError(f"{name}not read as an allocation snapshot: {error}", hint=_HINT) from None
    _check_size((given or {}).get("device_total_bytes"), snapshot, name)
    incidents = tuple(_incident(device, snapshot, rules) for device in snapshot.devices if device.refusal is not None)
    return Diagnosis(source, incidents, snapshot.notes, snapshot=snapshot)


def _check_size(given: Fact | None, snapshot: Snapshot, name: str) -> None:
    """Refuse a given size of the device that is less than what torch held of one and what was free on it then."""
    for device in snapshot.devices if given is not None else ():
        free = None if device.refusal is None or device.is_later else device.refusal.device_free_bytes
        least = device.reserved_bytes + (free or 0)
        assert given is not None  # noqa: S101 - else there is no device here
        if int(given.value) < least:
            beside = f", with {format_gib(free)} free beside it" if free else ""
            raise InputError(
                f"{name}the device's memory is given as {format_gib(int(given.value))}, and torch held "
                f"{format_gib(device.reserved_bytes)} of device {device.index}{beside}",
                hint=f"give its total memory, {-(-least >> 20)}MiB or more, or leave it out",
            )


def _whole(stream: IO[bytes]) -> bytes:
    """Return the input's bytes, one more than may be read at most; a first block that is refused is all that is read."""
    parts, size = [], 0
    if first := stream.read(_BLOCK_BYTES):
        with contextlib.suppress(CutOffError):
            check(first)
        parts, size = [first], len(first)
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
        settings["allocator_options"] = SettingInForce("allocator_options", snapshot.settings, True, _SOURCE)
    times = f", the last of {device.refusals}" if device.refusals > 1 else ""
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
    """Return what the stack of a refused allocation tells, read as the traceback that torch's exception prints."""
    frames = [_printed(frame) for frame in reversed(traceback)]
    texts = ["Traceback (most recent call last):", *frames, "torch.OutOfMemoryError: CUDA out of memory."]
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
        yield "largest_holder", " < ".join(str(frame) for frame in device.stacks[0].frames[:_SHOWN_FRAMES])
        yield "largest_holder_bytes", device.stacks[0].bytes
    if device.private_pool_bytes:
        yield "private_pool_bytes", device.private_pool_bytes
