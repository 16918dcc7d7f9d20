"""Solve how many rows of a failed call to run next, from what they held when it failed.

The first rows to run are few, because they are the measurement. The guard sizes the rest by it, so
nothing here must be exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from oomguard.core.facts import GIB, MIB, format_gib
from oomguard.core.incident import Alternative, Effect, Incident, Patch
from oomguard.estimate.constants import reserved_ratio
from oomguard.remedy.call_variants import Variant, solve_variant
from oomguard.remedy.policy import Policy
from oomguard.remedy.solution import Solution, in_words

# Sizes are printed with two decimals, so the true value may be lower by half of the last digit.
HALF_DECIMAL: Final = 0.005


def device_room_bytes(
    incident: Incident, base_bytes: int | None, margin_ratio: float
) -> float | None:
    """Return the bytes that may be used beyond ``base_bytes``; None if a size is unknown.

    A memory fraction limits what torch's allocator reserves, regardless of other memory use.
    """
    total = incident.number("device_total_bytes")
    if base_bytes is None or not total:
        return None
    others = incident.number("other_process_in_use_bytes") or 0
    beside_tensors = incident.number("non_torch_bytes") or 0
    room = (total - others) * (1 - margin_ratio) - beside_tensors
    allowed = incident.number("allowed_bytes")
    if allowed:
        surely = allowed - HALF_DECIMAL * (GIB if allowed >= GIB else MIB)
        room = min(room, surely * (1 - margin_ratio))
    return room - base_bytes


# Later rows may need slightly more than the measured ones.
BATCH_MARGIN_RATIO: Final = 0.01
# This fraction of the rows that should fit runs first, as the measurement. What they held when they
# failed says little about what they would have needed.
MEASURING_SHARE: Final = 4
# The same if a formula gives a row's need up to its end. It may miss half of a small model's need.
_ESTIMATED_SHARE: Final = 3
# The ratio for rows that failed after others of the same call had run. With few attempts left,
# fewer rows are tried.
_AFTER_OTHERS_RATIO: Final = 0.75
_LAST_ATTEMPTS: Final = 2


@dataclass(slots=True)
class CallModel:
    """A call of ``rows`` rows that did not fit.

    Attributes:
        rows: rows of the call, or of the failed part of it.
        base_bytes: allocated bytes on the device before the call; None if not counted.
        row_bytes: the bytes that one row needs; None if unknown.
        seen_row_bytes: the bytes per row when the call failed; a row would have needed more.
        estimated_row_bytes: the bytes that one row needs by a formula; None if none applies.
        is_cached: whether a caching allocator is used, which reserves more than tensors need.
        not_splittable: why the call cannot be split into rows; None if it can.
        others_ran: whether other rows of the call ran, so that one of these may need more.
        attempts_left: the number of further attempts; None if rows are only reported.
        variants: what of the call can be changed, by setting.
    """

    rows: int
    base_bytes: int | None
    row_bytes: int | None = None
    seen_row_bytes: int | None = None
    estimated_row_bytes: int | None = None
    is_cached: bool = False
    not_splittable: str | None = None
    others_ran: bool = False
    attempts_left: int | None = None
    variants: Mapping[str, Variant] = field(default_factory=dict)

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the value of one setting with which the call fits; None for other settings."""
        if setting in SOLVED_BY:
            return SOLVED_BY[setting](self, incident)
        if setting not in self.variants:
            return None
        if self.rows > 1 and self.not_splittable is None:
            return Solution(None, "oomguard first runs fewer rows at a time")
        room = self.room_bytes(incident)
        held = self.rows * (self.seen_row_bytes or 0)
        if room is not None and held:
            share = min(1.0, max(0.0, room / held))
        else:
            share = 1.0
        return solve_variant(setting, self.variants[setting], room, share)

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return nothing: each remedy of a call works alone, and later attempts add others."""
        del incident, policy
        return ()

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return nothing: the plan's reasons show why a single row does not fit."""
        del incident
        return ()

    def room_bytes(self, incident: Incident) -> float | None:
        """Return the bytes for rows beyond those allocated before; None if a size is unknown."""
        if self.is_cached:
            allocator = reserved_ratio()
        else:
            allocator = 0.0
        return device_room_bytes(incident, self.base_bytes, BATCH_MARGIN_RATIO + allocator)


def rows_to_run_next(call: CallModel, incident: Incident) -> Solution:
    """Return the rows to run next; blocked if the call cannot be split into rows."""
    found = _rows_for(call, incident)
    if call.not_splittable is None:
        return found
    return replace(found, blocked_by=call.not_splittable, effect=Effect.CHANGES_OUTPUTS)


def _rows_for(call: CallModel, incident: Incident) -> Solution:
    room = call.room_bytes(incident)
    base = call.base_bytes
    if room is None or base is None or not (call.row_bytes or call.seen_row_bytes):
        return _without_figures(call, incident)
    if not call.row_bytes:
        return _measuring(call, room)
    row_bytes = call.row_bytes
    seen = call.seen_row_bytes
    value = min(call.rows - 1, math.floor(room / row_bytes))
    if value < 1 and call.rows > 1 and seen is not None and seen <= room:
        value = 1  # the measurement does not rule out one row
    if value < 1:
        return Solution(
            None,
            f"one row needs {format_gib(row_bytes)}, but {format_gib(max(0, room))} is free for it",
        )
    reason = (
        f"one row needs {format_gib(row_bytes)}: {_rows(value)} in {format_gib(room)}, {call.rows} "
        "failed"
    )
    freed = round((call.rows - value) * row_bytes)
    predicts = {"peak_bytes": base + value * row_bytes}
    return Solution(value, reason, freed, predicts=predicts)


def _without_figures(call: CallModel, incident: Incident) -> Solution:
    """Return fewer rows if attempts are left, because no figure shows how many fit."""
    known = {
        "row_bytes": call.row_bytes or call.seen_row_bytes,
        "baseline_bytes": call.base_bytes,
        "device_total_bytes": incident.number("device_total_bytes"),
    }
    missing = [name for name, value in known.items() if not value]
    why = f"not known: {', '.join(map(in_words, missing))}"
    if call.attempts_left and call.rows > 1:
        return _fewer(call.rows, call.attempts_left, why)
    return Solution(None, why, unknown=tuple(f"{name}: not measured" for name in missing))


def _measuring(call: CallModel, room: float) -> Solution:
    """Return the few rows that most likely fit; they measure what a row needs."""
    rows = call.rows
    seen = call.seen_row_bytes or 0
    row_bytes = max(seen, call.estimated_row_bytes or 0)
    at_most = math.floor(room / row_bytes)
    if at_most < 1 and seen <= room:
        at_most = 1  # the measurement does not rule out one row
    if rows <= 1 or at_most < 1:
        held = f"one row held {format_gib(seen)} when it failed"
        why = f"{held}, but {format_gib(max(0, room))} is free"
        if room <= 0:
            why = "weights and inputs leave no memory for a single row"
        if call.others_ran and call.attempts_left and rows > 1:
            return _fewer(rows, call.attempts_left, f"{why}, but other rows ran")
        return Solution(None, why)
    if call.others_ran and (call.attempts_left or 0) > _LAST_ATTEMPTS:
        value = max(1, int(rows * _AFTER_OTHERS_RATIO))
        return Solution(
            value, f"{rows} rows failed after other rows of the call ran: {_rows(value)} at a time"
        )
    if call.estimated_row_bytes is None:
        share = MEASURING_SHARE
    else:
        share = _ESTIMATED_SHARE
    value = max(1, min(rows - 1, at_most) // share)
    held = f"{rows} rows held {format_gib(rows * seen)} when they failed, and needed more"
    return Solution(value, f"{held}: {_rows(value)} first, then as many as this measurement allows")


def _fewer(rows: int, attempts_left: int, why: str) -> Solution:
    """Return half of the rows, or fewer, so that the attempts left can reach one row."""
    share = max(2, math.ceil(rows ** (1 / attempts_left)))
    return Solution(
        max(1, rows // share), f"{why}; {rows} rows failed, so 1/{share} of them at a time"
    )


def _rows(number: int) -> str:
    return f"{number} row{'s' if number > 1 else ''}"


# Solvers for settings of a failed call that are not variants.
SOLVED_BY: Final[Mapping[str, Callable[[CallModel, Incident], Solution]]] = {
    "batch_size": rows_to_run_next,
}
