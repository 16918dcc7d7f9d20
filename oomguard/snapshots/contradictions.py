"""Figures of a snapshot that contradict each other: torch writes none, so a file that has them was changed, or was put together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Contradictions:
    """What does not fit, of all segments: only the first of a kind is named, the others are counted."""

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
        """Compare a segment's ``total_size``, where it has one, with its blocks; those of a wrong size are refused elsewhere."""
        sizes = [block.get("size") for block in blocks if type(block) is dict]
        held = sum(size for size in sizes if type(size) is int)
        total = segment.get("total_size", held)
        if type(total) is int and total == held:
            return
        if self._totals:
            self._other_totals += 1
            return
        told = f"{total:.40g}" if isinstance(total, float) else f"of type {type(total).__name__}"
        if type(total) is int:
            told = f"{total:,}" if 0 <= total < 1 << 63 else "no size"
        self._totals.append(f"segment {number} has the total_size {told}, and its blocks are {held:,} bytes")

    def notes(self) -> Iterator[str]:
        """Yield a note for each kind that was found."""
        for told in self._totals:
            others = f" (so do {self._other_totals:,} more)" if self._other_totals else ""
            yield f"{told}{others}: the blocks are counted; was the file changed?"
        if self._again:
            others = f" (so are {len(self._again) - 1:,} more)" if len(self._again) > 1 else ""
            yield f"segment {self._again[0]} is at the address of an earlier one{others}: counted once; was the file changed?"
