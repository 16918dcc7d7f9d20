"""A failed call as its model: how many of its rows fit, by a trace of it, else by what they held when it failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from oomguard.facts import format_gib
from oomguard.incident import Alternative, Incident, Patch
from oomguard.memory.constants import reserved_ratio
from oomguard.memory.generate.rows import CallTrace, largest_rows
from oomguard.remedy.policy import Policy
from oomguard.remedy.prompt_chunks import Chunks, chunk_that_fits
from oomguard.remedy.solution import Solution

# What was measured on other rows: those to come may be longer by a little.
BATCH_MARGIN_RATIO: Final = 0.01
# A trace counts every tensor (0.01 % beside the real allocator's count); kernels' scratch memory is not in it.
TRACED_MARGIN_RATIO: Final = 0.002
# Of the rows that failed, the part that is run to be measured: what they would still have asked for is not known.
MEASURING_SHARE: Final = 8


@dataclass(slots=True)
class CallModel:
    """A call of ``rows`` rows that did not fit.

    Attributes:
        rows: rows of the call, or of the part of it that failed.
        base_bytes: live bytes on the device before the call; None where nothing counts them.
        row_bytes: bytes that one row needs, where that is known.
        seen_row_bytes: bytes that one row held when the call failed; it would have gone on to more.
        trace: the call, to be asked what other numbers of rows need.
        total_rows: rows of the whole call, of which these are the last.
        beside_row_bytes: bytes that every part holds for each row of the whole call, beside its own.
        is_cached: whether tensors come from a caching allocator, which holds more than they are.
        not_splittable: why the rows cannot be run apart; None where they can.
        others_ran: whether rows of the same call ran, so that one of these may be heavier than the rest.
        attempts_left: how often the rest may be run again; None where the rows are only to be told.
        chunks: the call with its prompt in chunks; None where that is not known.
    """

    rows: int
    base_bytes: int | None
    row_bytes: int | None = None
    seen_row_bytes: int | None = None
    trace: CallTrace | None = None
    total_rows: int = 0
    beside_row_bytes: int = 0
    is_cached: bool = False
    not_splittable: str | None = None
    others_ran: bool = False
    attempts_left: int | None = None
    chunks: Chunks | None = None
    _asked: dict[int, tuple[int, int] | None] = field(init=False, default_factory=dict)

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the value of one setting with which the call fits; None where no row of ``SOLVED_BY`` solves it."""
        solver = SOLVED_BY.get(setting)
        if solver is None or (setting == "prefill_chunk_size" and self.chunks is None):
            return None
        # What forbids running rows apart says nothing of other settings.
        return replace(solver(self, incident), blocked_by=self.not_splittable if setting == "batch_size" else None)

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return no group: each setting of a call is enough alone or does not help."""
        del incident, policy
        return ()

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return nothing: the plan says why not one row fits."""
        del incident
        return ()

    @property
    def is_traced(self) -> bool:
        """Whether a trace has told how many rows fit."""
        return any(found is not None for found in self._asked.values())

    def room_bytes(self, incident: Incident, *, traced: bool = False) -> float | None:
        """Return the bytes that rows may take beyond what was alive before them; None where a size is not known.

        What a trace says needs less of a margin than what was measured on other rows, and none for the allocator's
        rules, through which it is replayed.
        """
        total = incident.number("device_total_bytes")
        if self.base_bytes is None or not total:
            return None
        allocator = reserved_ratio() if self.is_cached else 0.0
        margin_ratio = TRACED_MARGIN_RATIO if traced else BATCH_MARGIN_RATIO + allocator
        others = incident.number("other_process_in_use_bytes") or 0
        beside_tensors = incident.number("non_torch_bytes") or 0
        return (total - others) * (1 - margin_ratio) - beside_tensors - self.base_bytes

    def results_wait(self, incident: Incident) -> bool:
        """Return whether the rows that fit by a trace leave no room for the results of all: those then wait on the host."""
        found, room = self.traced_rows(incident), self.room_bytes(incident, traced=True)
        return bool(found and self.trace and room is not None and found[1] + self.trace.results_bytes() > room)

    def traced_rows(self, incident: Incident) -> tuple[int, int] | None:
        """Return the rows that fit by a trace and the bytes they need, (0, bytes of one) where none does; None: no trace."""
        room = self.room_bytes(incident, traced=True)
        if self.trace is None or room is None:
            return None
        trace, free = self.trace, round(room)

        def need(number: int) -> int | None:
            beside = self.total_rows * self.beside_row_bytes
            own = trace.need_bytes(number, free - beside)
            return None if own is None else own + beside

        if free not in self._asked:
            self._asked[free] = largest_rows(need, free, self.rows)
        return self._asked[free]


def rows_that_fit(call: CallModel, incident: Incident) -> Solution:
    """Return the rows that fit, else few enough that what they take can be measured."""
    found, room, base = call.traced_rows(incident), call.room_bytes(incident), call.base_bytes
    if found is not None and base is not None:
        return _traced(call, *found, base, call.room_bytes(incident, traced=True) or 0)
    if room is None or base is None or not (call.row_bytes or call.seen_row_bytes):
        known = {
            "row_bytes": call.row_bytes or call.seen_row_bytes,
            "baseline_bytes": base,
            "device_total_bytes": incident.number("device_total_bytes"),
        }
        missing = [name for name, value in known.items() if not value]
        if call.attempts_left and call.rows > 1:
            return _fewer(call.rows, call.attempts_left, f"not known: {', '.join(missing)}")
        return Solution(None, f"not known: {', '.join(missing)}", unknown=tuple(f"{n}: not measured" for n in missing))
    if not call.row_bytes:
        return _measuring(call, call.seen_row_bytes or 0, room)
    row_bytes, seen = call.row_bytes, call.seen_row_bytes
    value = min(call.rows - 1, math.floor(room / row_bytes))
    if value < 1 and call.rows > 1 and seen is not None and seen <= room:
        value = 1  # the estimate says that not one row fits, what was measured does not rule it out
    if value < 1:
        return Solution(None, f"one row needs {format_gib(row_bytes)}, {format_gib(max(0, room))} is free for it")
    reason = f"one row needs {format_gib(row_bytes)}: {_rows(value)} in {format_gib(room)}, {call.rows} failed"
    freed, predicts = round((call.rows - value) * row_bytes), {"peak_bytes": base + value * row_bytes}
    return Solution(value, reason, freed, predicts=predicts)


def prompt_in_chunks(call: CallModel, incident: Incident) -> Solution:
    """Return the tokens of a prompt to process at a time, where fewer rows do not help."""
    assert call.chunks is not None  # noqa: S101 - asked only of a call that has them
    if call.rows > 1 and call.not_splittable is None and (call.traced_rows(incident) or (1, 0))[0] > 0:
        return Solution(None, "fewer rows at a time come first")
    return chunk_that_fits(call.chunks, call.room_bytes(incident, traced=True))


def _traced(call: CallModel, fit: int, need: int, base: int, room: float) -> Solution:
    free, seen = format_gib(max(0, room)), call.seen_row_bytes
    if fit < 1 and call.rows > 1 and seen is not None and seen <= room:
        # The trace says that not one row fits, by a little or not at all: what was measured does not rule it out.
        return Solution(1, f"one row needs {format_gib(need)}, traced, and {free} is free for it; {call.rows} failed")
    if fit < 1:
        return Solution(None, f"one row needs {format_gib(need)}, traced, and {free} is free for it")
    reason = f"{_rows(fit)} peak at {format_gib(need)}, traced, of {free} that is free for them; {call.rows} failed"
    return Solution(fit, reason, round((call.rows - fit) * need / fit), predicts={"peak_bytes": base + need})


def _measuring(call: CallModel, seen_row_bytes: float, room: float) -> Solution:
    """Return a few rows that are most likely to end: what a row needs is known then, and not before."""
    rows, at_most = call.rows, math.floor(room / seen_row_bytes)
    if rows <= 1 or at_most < 1:
        why = f"one row held {format_gib(seen_row_bytes)} when it failed, {format_gib(max(0, room))} is free"
        if call.others_ran and call.attempts_left and rows > 1:
            return _fewer(rows, call.attempts_left, f"{why}, but others ran")
        return Solution(None, why)
    value = max(1, min(rows - 1, at_most) // MEASURING_SHARE)
    held = f"{rows} rows failed holding {format_gib(rows * seen_row_bytes)}, and would have gone on to more"
    return Solution(value, f"{held}: {_rows(value)} first, then as many as what they take allows")


def _fewer(rows: int, attempts_left: int, why: str) -> Solution:
    """Return half of the rows, or so many fewer that the attempts reach one row: no figure tells more, and rows stay the same."""
    share = max(2, math.ceil(rows ** (1 / attempts_left)))
    return Solution(max(1, rows // share), f"{why}; {rows} rows failed, so 1/{share} of them at a time")


def _rows(number: int) -> str:
    return f"{number} row{'s' if number > 1 else ''}"


# What solves a setting of a failed call, where a fix of a rule asks for it (`lever`, or a `solve` that MODELLED has).
SOLVED_BY: Final[Mapping[str, Callable[[CallModel, Incident], Solution]]] = {
    "batch_size": rows_that_fit,
    "prefill_chunk_size": prompt_in_chunks,
}
