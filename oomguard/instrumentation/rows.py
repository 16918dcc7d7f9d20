"""The calls that one watch has seen: the first ones row by row, later ones added up by name, so that a night fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from oomguard.instrumentation.ended_call import EndedCall
from oomguard.instrumentation.uses import most
from oomguard.timeline import SeenCall

MOST_ROWS: Final = 10_000
_MADE_AT_ONCE: Final = 64


class Rows:
    """Rows in the order in which they began; a row that failed or took several attempts is always one by itself."""

    def __init__(self) -> None:
        self._rows: list[SeenCall] = []
        self._ended: list[EndedCall] = []
        self._added_up: dict[tuple[str, str, str], SeenCall] = {}

    def add(self, call: EndedCall) -> None:
        """Take a call that ended."""
        self._ended.append(call)
        if len(self._ended) >= _MADE_AT_ONCE:
            self._make()

    def _make(self) -> None:
        for call in self._ended:
            self._take(call.row())
        self._ended.clear()

    def _take(self, row: SeenCall) -> None:
        if len(self._rows) < MOST_ROWS or row.error or len(row.attempts) > 1:
            self._rows.append(row)
            return
        key = row.what, row.kind, row.model
        self._added_up[key] = _sum(self._added_up[key], row) if key in self._added_up else row

    def all(self) -> tuple[SeenCall, ...]:
        """Return them, those that are added up at the end."""
        self._make()
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
