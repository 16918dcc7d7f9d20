"""A failed call as its model: how many of its rows fit, by a trace of it, else by what they held when it failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from oomguard.facts import GIB, MIB, FactValue, format_gib
from oomguard.incident import Alternative, Effect, Incident, Patch
from oomguard.memory.constants import reserved_ratio
from oomguard.memory.generate.rows import CallTrace, largest_rows, most_rows
from oomguard.remedy.cache_elsewhere import CACHE, both
from oomguard.remedy.call_variants import VARIED, solved
from oomguard.remedy.device_room import HALF_DECIMAL, device_room_bytes
from oomguard.remedy.missing_facts import in_words
from oomguard.remedy.permitted import grouped, present_value
from oomguard.remedy.policy import Policy
from oomguard.remedy.prompt_chunks import CHUNK
from oomguard.remedy.solution import Solution
from oomguard.remedy.variant import Variant
from oomguard.settings import effect_of
from oomguard.surfaces import as_kwarg

# What was measured on other rows: those to come may be longer by a little.
BATCH_MARGIN_RATIO: Final = 0.01
# A trace counts every tensor (0.01 % beside the real allocator's count); kernels' scratch memory is not in it.
TRACED_MARGIN_RATIO: Final = 0.002
# Of the rows that failed, the part that is run to be measured: what they would still have asked for is not known.
MEASURING_SHARE: Final = 8
# Of rows that failed after others of the same call had run; where few attempts are left, fewer are tried.
_AFTER_OTHERS_RATIO: Final = 0.75
_LAST_ATTEMPTS: Final = 2
# What a call asks for by a trace may be off by a row's padding: larger sizes come in steps of as much.
_ALLOCATOR_STEP_BYTES: Final = 2 * MIB
_SEVERAL: Final = 2
# A setting, its value now, another one, and why that one.
_Change = tuple[str, FactValue | None, FactValue, str]


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
        variants: what of the call may be done another way, by setting.
        room_ratio: the part of the room that rows may fill by a trace.
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
    variants: Mapping[str, Variant] = field(default_factory=dict)
    room_ratio: float = 1.0
    _whole: dict[float, list[_Change]] = field(init=False, default_factory=dict)
    _asked: dict[int, tuple[int, int] | None] = field(init=False, default_factory=dict)

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the value of one setting with which the call fits; None where this call has no such setting."""
        if setting in SOLVED_BY:
            return SOLVED_BY[setting](self, incident)
        if setting not in self.variants:
            return None
        if self._fewer_rows_may_do(incident):
            return Solution(None, "fewer rows at a time come first")
        found = solved(setting, self.variants[setting], self.rows, self.room_bytes(incident, traced=True))
        costs = found.value is not None and effect_of(setting, None, found.value) > Effect.OUTPUT_PRESERVING
        if costs and self._kept_whole(incident):
            return Solution(None, "the cache on the host and the prompt in chunks, together, change no output")
        return found

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return patches of one group: a setting with which one row fits, and the rows that fit with it.

        Rows that cannot be run apart get the setting with which all of them fit. Where no setting alone is enough, the cache on the
        host and the prompt in chunks may be.
        """
        room = self.room_bytes(incident, traced=True)
        if room is None or self._fewer_rows_may_do(incident):
            return ()
        if self.rows < _SEVERAL:
            return self._patches(self._kept_whole(incident), incident, policy)
        blocked: tuple[Patch, ...] = ()
        for setting in (name for name in VARIED if name in self.variants):
            solution = solved(setting, self.variants[setting], 1 if self._runs_apart else self.rows, room)
            if solution.value is None:
                continue
            group = self._group(setting, solution, round(room), incident, policy)
            if group and all(patch.applicable for patch in group):
                return group
            blocked = blocked or group
        return blocked

    def _group(
        self, setting: str, solution: Solution, room: int, incident: Incident, policy: Policy
    ) -> tuple[Patch, ...]:
        variant, value = self.variants[setting], solution.value
        assert value is not None  # noqa: S101 - just asked
        changes: list[tuple[str, FactValue | None, FactValue]] = [(setting, present_value(setting, incident), value)]
        reason = solution.reason
        if self._runs_apart:
            found = largest_rows(lambda rows: variant.need_bytes(value, rows, room), room, self.rows)
            if found is None:
                return ()
            rows = max(1, found[0])
            changes.append(("batch_size", self.rows, rows))
            reason = f"{_rows(rows)} at a time: {reason}"
        return self._patches([(*change, reason) for change in changes], incident, policy)

    def _kept_whole(self, incident: Incident) -> list[_Change]:
        """Return the cache on the host and the prompt in chunks, where one row fits with both and with neither alone."""
        room = self.room_bytes(incident, traced=True)
        if self.rows > 1 or room is None or not {CHUNK, CACHE} <= set(self.variants):
            return []
        if room not in self._whole:
            found = both(self.variants[CHUNK], self.variants[CACHE], round(room))
            self._whole[room] = [(name, present_value(name, incident), value, why) for name, value, why in found]
        return self._whole[room]

    @staticmethod
    def _patches(changes: Sequence[_Change], incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        patches = [
            Patch(name, old, new, effect_of(name, old, new), reason, as_kwarg=as_kwarg(name, new, "transformers"))
            for name, old, new, reason in changes
        ]
        return grouped(patches, incident, policy)

    @property
    def _runs_apart(self) -> bool:
        return self.rows > 1 and self.not_splittable is None

    def _fewer_rows_may_do(self, incident: Incident) -> bool:
        """Return whether fewer rows at a time fit, or no trace says that not one does."""
        return self._runs_apart and (self.traced_rows(incident) or (1, 0))[0] > 0

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
        allocator = reserved_ratio() if self.is_cached else 0.0
        margin_ratio = TRACED_MARGIN_RATIO if traced else BATCH_MARGIN_RATIO + allocator
        return device_room_bytes(incident, self.base_bytes, margin_ratio)

    def results_wait(self, incident: Incident) -> bool:
        """Return whether the rows that fit by a trace leave no room for the results of all: those then wait on the host."""
        found, room = self.traced_rows(incident), self.room_bytes(incident, traced=True)
        return bool(found and self.trace and room is not None and found[1] + self.trace.results_bytes() > room)

    def traced_rows(self, incident: Incident) -> tuple[int, int] | None:
        """Return the rows that fit by a trace and the bytes they need, (0, bytes of one) where none does; None: no trace."""
        room = self.room_bytes(incident, traced=True)
        if self.trace is None or room is None:
            return None
        trace, free = self.trace, round(room * self.room_ratio)

        def beside(number: int) -> int:
            return self.total_rows * self.beside_row_bytes + round(number * self._unseen_row_bytes(incident))

        def need(number: int) -> int | None:
            return _plus(trace.need_bytes(number, free - beside(number)), beside(number))

        def estimate(number: int) -> int | None:
            return _plus(trace.estimated_bytes(number, free - beside(number)), beside(number))

        if free not in self._asked:
            is_line = not self.is_cached  # an allocator's blocks follow no line
            self._asked[free] = (
                largest_rows(need, free, self.rows) if is_line else most_rows(need, estimate, free, self.rows)
            )
        return self._asked[free]

    def _unseen_row_bytes(self, incident: Incident) -> float:
        """Return the bytes for each row of what was refused where the trace never asks for that: a kernel's own memory; else 0."""
        tried = incident.facts.get("tried_bytes")
        if self.trace is None or tried is None or not self.is_cached:
            return 0.0
        size = float(tried.value)
        slack = max(tried.slack, HALF_DECIMAL * (GIB if size >= GIB else MIB)) + _ALLOCATOR_STEP_BYTES
        asked = self.trace.asks_for(self.rows, size, slack)
        return size / self.rows if asked is False else 0.0


def _plus(need_bytes: int | None, beside_bytes: int) -> int | None:
    return None if need_bytes is None else need_bytes + beside_bytes


def rows_that_fit(call: CallModel, incident: Incident) -> Solution:
    """Return the rows that fit, blocked where rows cannot be run apart; other settings are not blocked by that."""
    found = _rows_that_fit(call, incident)
    if call.not_splittable is None:
        return found
    return replace(found, blocked_by=call.not_splittable, effect=Effect.CHANGES_OUTPUTS)  # of rows that need each other


def _rows_that_fit(call: CallModel, incident: Incident) -> Solution:
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
            return _fewer(call.rows, call.attempts_left, f"not known: {', '.join(map(in_words, missing))}")
        return Solution(
            None,
            f"not known: {', '.join(map(in_words, missing))}",
            unknown=tuple(f"{n}: not measured" for n in missing),
        )
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
        if room <= 0:
            why = "what is there before any row runs, weights and inputs, leaves nothing free"
        if call.others_ran and call.attempts_left and rows > 1:
            return _fewer(rows, call.attempts_left, f"{why}, but others ran")
        return Solution(None, why)
    if call.others_ran and (call.attempts_left or 0) > _LAST_ATTEMPTS:
        value = max(1, int(rows * _AFTER_OTHERS_RATIO))
        return Solution(value, f"{rows} rows failed where other rows of the call ran: {_rows(value)} at a time")
    value = max(1, min(rows - 1, at_most) // MEASURING_SHARE)
    held = f"{rows} rows failed holding {format_gib(rows * seen_row_bytes)}, and would have gone on to more"
    return Solution(value, f"{held}: {_rows(value)} first, then as many as what they take allows")


def _fewer(rows: int, attempts_left: int, why: str) -> Solution:
    """Return half of the rows, or so many fewer that the attempts reach one row: no figure tells more, and rows stay the same."""
    share = max(2, math.ceil(rows ** (1 / attempts_left)))
    return Solution(max(1, rows // share), f"{why}; {rows} rows failed, so 1/{share} of them at a time")


def _rows(number: int) -> str:
    return f"{number} row{'s' if number > 1 else ''}"


# What solves a setting of a failed call that is no variant of it, where a fix of a rule asks for it.
SOLVED_BY: Final[Mapping[str, Callable[[CallModel, Incident], Solution]]] = {
    "batch_size": rows_that_fit,
}
