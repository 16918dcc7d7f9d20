"""The use of each counter, made of what it showed before, at most, and after."""

from __future__ import annotations

from collections.abc import Mapping

from oomguard.timeline import ALLOCATED, RESERVED, Counter, MemoryUse


def most(*sizes: int | None) -> int | None:
    """Return the largest of the sizes that are known; None where none is."""
    return max((size for size in sizes if size is not None), default=None)


def uses_of(
    before: Mapping[Counter, int],
    peaks: Mapping[Counter, int],
    after: Mapping[Counter, int],
    limits: Mapping[Counter, int],
) -> tuple[MemoryUse, ...]:
    """Return the use of every counter that was read at any time; only torch keeps the exact peak of its own."""
    return tuple(
        MemoryUse(
            key.device,
            key.what,
            before.get(key),
            most(before.get(key), peaks.get(key), after.get(key)),
            after.get(key),
            limits.get(key),
            sampled=key.what not in {ALLOCATED, RESERVED},
        )
        for key in dict.fromkeys([*before, *peaks, *after])
    )
