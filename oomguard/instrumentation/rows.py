"""The calls that one watch has seen: the first ones row by row, later ones added up by name, so that a night fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from oomguard.timeline import ALLOCATED, RESERVED, Counter, MemoryUse, SeenCall

MOST_ROWS: Final = 10_000


class Rows:
    """Rows in the order in which they began; a row that failed or took several attempts is always one by itself."""

    def __init__(self) -> None:
        self._rows: list[SeenCall] = []
        self._added_up: dict[tuple[str, str, str], SeenCall] = {}

    def add(self, row: SeenCall) -> None:
        """Take a call that ended."""
        if len(self._rows) < MOST_ROWS or row.error or len(row.attempts) > 1:
            self._rows.append(row)
            return
        key = row.what, row.kind, row.model
        self._added_up[key] = _sum(self._added_up[key], row) if key in self._added_up else row

    def all(self) -> tuple[SeenCall, ...]:
        """Return them, those that are added up at the end."""
        return (*sorted(self._rows, key=lambda row: row.began_s), *self._added_up.values())


def _sum(sum_of_rows: SeenCall, row: SeenCall) -> SeenCall:
    later = {(use.device, use.what): use for use in row.uses}
    uses = tuple(
        replace(
            use,
            peak_bytes=most(use.peak_bytes, later[use.device, use.what].peak_bytes),
            after_bytes=later[use.device, use.what].after_bytes,
        )
        if (use.device, use.what) in later
        else use
        for use in sum_of_rows.uses
    )
    return replace(
        sum_of_rows,
        seconds=sum_of_rows.seconds + row.seconds,
        rows=_plus(sum_of_rows.rows, row.rows),
        prompt_tokens=_plus(sum_of_rows.prompt_tokens, row.prompt_tokens),
        max_new_tokens=None,
        uses=uses,
        attempts=(),
        calls=sum_of_rows.calls + row.calls,
    )


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


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
