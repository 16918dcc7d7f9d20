"""Show an allocator snapshot: sentences, tables, a terminal panel and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.facts import format_gib
from oomguard.report.bar import percent

if TYPE_CHECKING:
    from rich.console import RenderableType

    from oomguard.core.measurements import (
        DeviceMemory,
        Frame,
        LiveStack,
        Refusal,
        SegmentGroup,
        Snapshot,
    )

STACK_HEADINGS: Final = ("live", "share", "blocks", "allocated by")
GROUP_HEADINGS: Final = ("segments of", "number", "reserved", "live", "free", "largest free")
# The tables must fit on a screen. The JSON contains all rows.
SHOWN_GROUPS: Final = 8
SHOWN_STACKS: Final = 8
# torch writes a snapshot on request, so the allocator may have gone on after the failure.
_UNDONE: Final = (
    "The snapshot was taken {events} later. oomguard undid them, so the blocks are those at the "
    "failure."
)
_LATER: Final = (
    "The snapshot was taken {events} later, and oomguard could not undo them. The blocks are those "
    "at the snapshot, so they do not explain the failure."
)
# Recording stacks is optional in torch, and C++ threads have no Python stack.
NO_STACK: Final = "no Python stack (not recorded, or a C++ thread such as autograd's)"


def title(device: DeviceMemory) -> str:
    """Return the heading of a device's section."""
    return f"memory snapshot, device {device.index}"


def sentences(device: DeviceMemory) -> Iterator[str]:
    """Yield sentences about torch's memory on a device and the failed allocation."""
    blocks = _counted(device.blocks, "block")
    segments = _counted(device.segments, "segment")
    parts = ", ".join(f"{format_gib(size)} {name}" for name, size in _states(device))
    yield (
        f"torch reserved {format_gib(device.reserved_bytes)} in {segments} and {blocks}: "
        f"{parts or 'no blocks'}."
    )
    if device.refusal is None:
        yield f"The largest free block is {format_gib(device.largest_free_bytes)}."
    else:
        yield from _refused(device, device.refusal)
    if device.private_pool_bytes:
        yield (
            f"{format_gib(device.private_pool_bytes)} is in use in private pools: CUDA graphs, or "
            "a MemPool of the program."
        )


def _refused(device: DeviceMemory, refusal: Refusal) -> Iterator[str]:
    """Yield sentences about the failed allocation, the free blocks, and earlier failures."""
    parts = []
    if refusal.largest_free_bytes and refusal.free_blocks_bytes is not None:
        largest = format_gib(refusal.largest_free_bytes)
        together = format_gib(refusal.free_blocks_bytes)
        parts.append(
            f"The largest free block that it could use was {largest}, "
            f"all of them together {together}"
        )
    # None means that the size is unknown, so the test is for zero alone.
    elif refusal.largest_free_bytes == 0:
        parts.append("It could use no free block")
    if refusal.waiting_blocks_bytes:
        parts.append(f"{format_gib(refusal.waiting_blocks_bytes)} waited for another stream")
    if refusal.device_free_bytes is not None:
        parts.append(
            f"{'the' if parts else 'The'} device had {format_gib(refusal.device_free_bytes)} free"
        )
    texts = filter(None, (_asked(refusal), "; ".join(parts)))
    yield " ".join(f"{text}." for text in texts)
    if device.is_later:
        yield _LATER.format(events=_counted(device.later_events, "event"))
    elif device.later_events:
        yield _UNDONE.format(events=_counted(device.later_events, "event"))
    if device.earlier_refusals:
        yield (
            f"It is the last of {device.refusals:,} failed allocations in this history. The first: "
            f"{_asked(device.earlier_refusals[0])}."
        )


def _asked(refusal: Refusal) -> str:
    if refusal.frames:
        by = f" at {stack_text(refusal.frames)}"
    else:
        by = ""
    return f"{format_gib(refusal.tried_bytes)} could not be allocated{by}"


def _states(device: DeviceMemory) -> list[tuple[str, int]]:
    """Return the name and bytes of each state of the device's blocks."""
    rows = [
        ("in use", device.allocated_bytes),
        ("waiting for another stream", device.waiting_bytes),
        ("free between blocks in use", device.split_bytes),
        ("in free segments", device.free_bytes),
    ]
    # A state without blocks would only lengthen the sentence.
    shown = []
    for row in rows:
        if row[1]:
            shown.append(row)
    return shown


def stack_rows(device: DeviceMemory, most: int | None = None) -> list[tuple[str, str, str, str]]:
    """Return the live blocks by stack, largest first, and the sum of the rest.

    Args:
        device: the device.
        most: the number of rows before the rest; None for all recorded rows.
    """
    shown = device.stacks[:most]
    rows = [_stack_row(stack, device.allocated_bytes) for stack in shown]
    rest = device.stacks[len(shown) :]
    stacks = len(rest) + device.other_stacks
    if stacks:
        size = sum(stack.bytes for stack in rest) + device.other_stacks_bytes
        if device.allocated_bytes:
            share = percent(size / device.allocated_bytes)
        else:
            share = ""
        rows.append((format_gib(size), share, "", f"{_counted(stacks, 'other stack')}"))
    return rows


def group_rows(device: DeviceMemory) -> list[tuple[str, ...]]:
    """Return the segments by pool, stream and block size."""
    rows: list[tuple[str, ...]] = []
    for group in device.groups[:SHOWN_GROUPS]:
        rows.append(
            (
                group_name(group),
                f"{group.segments:,}",
                format_gib(group.reserved_bytes),
                format_gib(group.live_bytes),
                format_gib(group.free_bytes),
                format_gib(group.largest_free_bytes),
            )
        )
    more = len(device.groups[SHOWN_GROUPS:]) + device.other_groups
    if more:
        return [*rows, (f"{more:,} more", "", "", "", "", "")]
    return rows


def group_name(group: SegmentGroup) -> str:
    """Return ``large blocks``, with the pool and stream unless they are the default."""
    size = {True: "large blocks", False: "small blocks", None: "all blocks"}[group.is_large]
    if group.pool is None:
        pool = None
    else:
        pool = f"private pool {group.pool[0]}:{group.pool[1]}"
    stream = f"stream {group.stream:#x}" if group.stream else None
    names = [pool, size, stream]
    if group.is_expandable:
        names.append("expandable")
    return ", ".join(filter(None, names))


def stack_text(frames: tuple[Frame, ...], most: int = 3) -> str:
    """Return the innermost lines of a stack in one line."""
    if frames:
        # The innermost lines name the layer, and the outer ones are often the same.
        return " < ".join(map(str, frames[:most]))
    return NO_STACK


def snapshot_panel(device: DeviceMemory, *, ascii_only: bool = False) -> RenderableType:
    """Return one device of a snapshot as a panel; its texts must be printable (``drawn``)."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    parts: list[RenderableType] = list(map(Text, sentences(device)))
    if device.stacks:
        parts += [
            Text(),
            _table(STACK_HEADINGS, stack_rows(device, SHOWN_STACKS), text_columns={3}),
        ]
    if device.groups:
        parts += [Text(), _table(GROUP_HEADINGS, group_rows(device), text_columns={0})]
    # Some terminals cannot encode rounded corners.
    if ascii_only:
        frame = box.ASCII
    else:
        frame = box.ROUNDED
    if device.refusal is None:
        style = "green"
    else:
        style = "red"
    return Panel(
        Group(*parts), title=Text(title(device)), title_align="left", border_style=style, box=frame
    )


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], text_columns: set[int]
) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(headings):
        is_text = number in text_columns
        table.add_column(
            heading, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold"
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def snapshot_dict(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as the contract's object, with its texts unchanged."""
    return {
        "allocator_options": snapshot.settings,
        "devices": list(map(_device_dict, snapshot.devices)),
    }


def _stack_row(stack: LiveStack, allocated_bytes: int) -> tuple[str, str, str, str]:
    if allocated_bytes:
        share = percent(stack.bytes / allocated_bytes)
    else:
        share = ""
    return format_gib(stack.bytes), share, f"{stack.blocks:,}", stack_text(stack.frames)


def _counted(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def _device_dict(device: DeviceMemory) -> dict[str, Any]:
    refusal = device.refusal
    stacks = []
    for stack in device.stacks:
        stacks.append(
            {
                "bytes": stack.bytes,
                "blocks": stack.blocks,
                "largest_bytes": stack.largest_bytes,
                "frames": _frames(stack.frames),
            }
        )
    pools = []
    for group in device.groups:
        pools.append(
            {
                "pool": group.pool and list(group.pool),
                "stream": group.stream,
                "large": group.is_large,
                "expandable": group.is_expandable,
                "segments": group.segments,
                "reserved_bytes": group.reserved_bytes,
                "live_bytes": group.live_bytes,
                "free_bytes": group.free_bytes,
                "largest_free_block_bytes": group.largest_free_bytes,
                "waiting_bytes": group.waiting_bytes,
            }
        )
    return {
        "gpu_index": device.index,
        "segments": device.segments,
        "blocks": device.blocks,
        "reserved_total_bytes": device.reserved_bytes,
        "allocated_bytes": device.allocated_bytes,
        "requested_bytes": device.requested_bytes,
        "waiting_bytes": device.waiting_bytes,
        "split_free_bytes": device.split_bytes,
        "free_segments_bytes": device.free_bytes,
        "largest_free_block_bytes": device.largest_free_bytes,
        "private_pool_bytes": device.private_pool_bytes,
        "events": device.events,
        "refusals": device.refusals,
        "refused": refusal
        and {
            **_asked_dict(refusal),
            "free_blocks_bytes": refusal.free_blocks_bytes,
            "largest_free_block_bytes": refusal.largest_free_bytes,
            "waiting_blocks_bytes": refusal.waiting_blocks_bytes,
        },
        "earlier_refusals": list(map(_asked_dict, device.earlier_refusals)),
        "later_events": device.later_events,
        "blocks_are_later": device.is_later,
        "stacks": stacks,
        "other_stacks": {"stacks": device.other_stacks, "bytes": device.other_stacks_bytes},
        "pools": pools,
        "other_pools": device.other_groups,
    }


def _asked_dict(refusal: Refusal) -> dict[str, Any]:
    tried = refusal.tried_bytes
    free = refusal.device_free_bytes
    return {"tried_bytes": tried, "device_free_bytes": free, "frames": _frames(refusal.frames)}


def _frames(frames: tuple[Frame, ...]) -> list[dict[str, Any]]:
    rows = []
    for frame in frames:
        rows.append({"file": frame.file, "line": frame.line, "function": frame.function})
    return rows
