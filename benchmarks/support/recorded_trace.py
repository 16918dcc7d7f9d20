"""What torch's allocator did on a real GPU, from a memory snapshot (``torch.cuda.memory._dump_snapshot``), and the same replayed.

A snapshot holds the segments at its end and the events before. Undone from the end, the events give the segments and blocks
that were there when the recording began; from there the simulated allocator takes the same allocations and frees.
"""

import pickle
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomguard.memory.generate.caching_allocator import Block, CachingAllocator

MIB = 2**20


class _Data(pickle.Unpickler):
    """Reads lists, dicts, text and numbers; a pickle that names anything that could be called is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no data")


@dataclass(frozen=True, slots=True)
class Trace:
    """One device's events, and what was there before the first: segments and blocks in use, by address."""

    events: list[dict[str, Any]]
    segments: dict[int, int]
    in_use: dict[int, int]
    block_sizes: dict[int, int]


@dataclass(frozen=True, slots=True)
class Replayed:
    """Bytes held at most, by torch and by the simulated allocator, and the largest difference at any allocation."""

    allocations: int
    segments_taken: int
    torch_bytes: int
    simulated_bytes: int
    worst_ratio: float


def traces(path: Path) -> Iterator[Trace]:
    """The traces of a snapshot that can be replayed: of one stream, without expandable segments or private pools."""
    with path.open("rb") as file:
        snapshot = _Data(file).load()
    for device, events in enumerate(snapshot["device_traces"]):
        segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
        if any(event["action"] == "alloc" for event in events) and _plain(segments, events):
            yield _from_its_beginning(segments, events)


def replay(trace: Trace) -> Replayed:
    """Run the trace's allocations and frees through the simulated allocator."""
    allocator = CachingAllocator()
    held = _begin(allocator, trace)
    real = most = sum(trace.segments.values())
    allocations = taken = 0
    worst, before = 0.0, ""
    for event in trace.events:
        action, address, size = event["action"], event.get("addr"), event["size"]  # a refusal has no address
        if action == "segment_alloc":
            real, taken = real + size, taken + 1
            most = max(most, real)
        elif action == "segment_free":
            real -= size
            if before != action:  # torch.cuda.empty_cache(), or what torch does itself on a full device: all at once
                allocator.empty_cache()
        elif action == "alloc":
            held[address] = (allocator.allocate(size), size)
            allocations += 1
            worst = max(worst, abs(allocator.reserved_bytes / real - 1))
        elif action == "free_completed":
            allocator.release(*held.pop(address))
        before = action
    return Replayed(allocations, taken, most, allocator.peak_reserved_bytes, worst)


def _plain(segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> bool:
    pools = {tuple(segment.get("segment_pool_id", (0, 0))) for segment in segments}
    streams = {event["stream"] for event in events} | {segment["stream"] for segment in segments}
    return pools <= {(0, 0)} and len(streams) == 1 and not any(segment.get("is_expandable") for segment in segments)


def _from_its_beginning(segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> Trace:
    """Undo the events, the last one first."""
    there = {segment["address"]: segment["total_size"] for segment in segments}
    in_use, sizes = {}, {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                in_use[address], sizes[address] = block.get("requested_size", block["size"]), block["size"]
            address += block["size"]
    for event in reversed(events):
        action, address = event["action"], event.get("addr")
        if action == "segment_alloc":
            del there[address]
        elif action == "segment_free":
            there[address] = event["size"]
        elif action == "alloc":
            del in_use[address]
            sizes.pop(address, None)
        elif action == "free_completed":
            in_use[address] = event["size"]
    return Trace(events, there, in_use, sizes)


def _begin(allocator: CachingAllocator, trace: Trace) -> dict[int, tuple[Block, int]]:
    """Put what was there before the first event into the allocator; return its blocks in use, by address."""
    held: dict[int, tuple[Block, int]] = {}
    addresses = sorted(trace.in_use)
    for start in sorted(trace.segments):
        end = start + trace.segments[start]
        within = addresses[bisect_left(addresses, start) : bisect_left(addresses, end)]
        pieces, at = [], start
        for address, following in zip(within, [*within[1:], end], strict=False):
            if address > at:
                pieces.append((address - at, False))
            asked = trace.in_use[address]
            size = trace.block_sizes.get(address, max(512, -(-asked // 512) * 512))
            if asked > MIB and following - address - size <= MIB:
                size = following - address  # so small a rest of a large block is not split off
            pieces.append((size, True))
            at = address + size
        if at < end:
            pieces.append((end - at, False))
        small = end - start == 2 * MIB and all(trace.in_use[address] <= MIB for address in within)
        blocks = allocator.take_over(pieces, small=small)
        held |= {address: (block, trace.in_use[address]) for address, block in zip(within, blocks, strict=True)}
    return held
