"""Model what failed in this process, a call or a load of weights, and solve its next attempt.

The first rows of a call to run are few, because they are the measurement. The guard sizes the rest
by it, so nothing here must be exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from oomguard.core.facts import GIB, MIB, FactValue, format_gib
from oomguard.core.incident import Alternative, Effect, Incident, Patch
from oomguard.core.settings import effect_of
from oomguard.estimate.constants import reserved_ratio
from oomguard.remedy.policy import Policy, present_value, why_blocked
from oomguard.remedy.solution import Solution, in_words

# If fewer rows do not help, a call runs in another way: attention without scores, prefill in
# chunks, KV cache on the host. With permission come a quantized KV cache, fewer new tokens, and a
# shorter prompt.


CHUNK: Final = "prefill_chunk_size"
CACHE: Final = "cache_implementation"
# transformers' name for torch's attention, which keeps no score matrix.
WITHOUT_SCORES: Final = "sdpa"
SMALLEST_CHUNK_TOKENS: Final = 32
# The values of the cache setting, the least costly first.
CACHES: Final[tuple[FactValue, ...]] = ("offloaded", "offloaded_static", "quantized")
# The first chunk is at most this fraction of the prompt, and a later one of the failed chunk.
_CHUNK_SHARE: Final = 4
# If no formula gives the need, tokens are reduced at least to this ratio.
_FEWER_RATIO: Final = 0.9
# With fewer than one in so many tokens left, an answer or a prompt is useless.
_LEAST_SHARE: Final = 8


@dataclass(frozen=True, slots=True)
class Variant:
    """One setting of a failed call that can be changed.

    Attributes:
        now: its value in the failed call; None if it has none.
        why_not: returns why it cannot have a value; None if it can.
        row_bytes: returns the bytes of one row with a value, by a formula; None if unknown.
        is_changed: whether oomguard has already changed it.
    """

    now: FactValue | None
    why_not: Callable[[FactValue], str | None]
    row_bytes: Callable[[FactValue], int | None] = lambda _value: None
    is_changed: bool = False


def solve_variant(
    setting: str, variant: Variant, room_bytes: float | None, share: float
) -> Solution:
    """Return the value of a setting for the next attempt, or why there is none.

    Args:
        setting: the setting's name, a key of ``VARIED``.
        variant: what its values mean for the call.
        room_bytes: the bytes that the call may use; None if unknown.
        share: the room divided by what the call held when it failed, at most 1.
    """
    return VARIED[setting](variant, room_bytes, share)


def _without_scores(variant: Variant, room_bytes: float | None, share: float) -> Solution:
    del room_bytes, share
    why_not = variant.why_not(WITHOUT_SCORES)
    if why_not is not None:
        return Solution(None, why_not)
    return Solution(WITHOUT_SCORES, "this attention keeps no score matrix")


def _chunk(variant: Variant, room_bytes: float | None, share: float) -> Solution:
    del room_bytes
    if isinstance(variant.now, int):
        tokens = variant.now
    else:
        tokens = 0
    at_most = max(SMALLEST_CHUNK_TOKENS, int(tokens * min(share, 1 / _CHUNK_SHARE)))
    size = 1 << (at_most.bit_length() - 1)  # a power of two
    if size >= tokens:
        return Solution(
            None,
            f"{tokens} tokens at once failed, and oomguard uses no chunks below "
            f"{SMALLEST_CHUNK_TOKENS}",
        )
    why_not = variant.why_not(size)
    if why_not is None:
        return Solution(size, f"{tokens} tokens at once failed")
    return Solution(None, why_not)


def _cache(variant: Variant, room_bytes: float | None, share: float) -> Solution:
    del room_bytes, share
    reasons: list[str] = []
    for value in CACHES:
        if value == variant.now:
            continue
        why_not = variant.why_not(value)
        if why_not is None:
            return Solution(value, "the KV cache then uses less device memory")
        reasons.append(why_not)
    return Solution(None, "; ".join(dict.fromkeys(reasons)))


def _fewer_tokens(what: str) -> Callable[[Variant, float | None, float], Solution]:
    """Return a solver for the most tokens of a kind with which one row fits by a formula."""

    def solve(variant: Variant, room_bytes: float | None, share: float) -> Solution:
        if isinstance(variant.now, int):
            now = variant.now
        else:
            now = 0
        if now < 1:
            return Solution(None, f"the call has no {what} tokens")
        if room_bytes is None:
            return Solution(None, f"the need of fewer {what} tokens is not known")
        if variant.row_bytes(1) is None:
            tokens = int(now * min(share, _FEWER_RATIO))
            reason = f"{format_gib(room_bytes)} is {share:.0%} of what the row held when it failed"
        else:
            # A changed value has failed too, so the formula was not exact enough.
            if variant.is_changed:
                at_most = now // 2
            else:
                at_most = now - 1
            tokens = _most_tokens(
                at_most, lambda size: (variant.row_bytes(size) or 0) <= room_bytes
            )
            need = format_gib(variant.row_bytes(tokens) or 0)
            reason = f"a row with {tokens} {what} tokens needs {need} of {format_gib(room_bytes)}"
        if tokens * _LEAST_SHARE < now or tokens < 1:
            return Solution(
                None,
                f"only {max(0, tokens)} of {now} {what} tokens fit in {format_gib(room_bytes)}",
            )
        why_not = variant.why_not(tokens)
        if why_not is None:
            return Solution(tokens, reason)
        return Solution(None, why_not)

    return solve


def _most_tokens(at_most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to ``at_most`` that fits, 0 if none does."""
    low = 0
    high = at_most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


# By setting, the least costly first.
VARIED: Final[Mapping[str, Callable[[Variant, float | None, float], Solution]]] = {
    "attn_implementation": _without_scores,
    CHUNK: _chunk,
    CACHE: _cache,
    "max_new_tokens": _fewer_tokens("new"),
    "truncate_prompt_tokens": _fewer_tokens("prompt"),
}


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
    missing = []
    for name, value in known.items():
        if not value:
            missing.append(name)
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


# Weights that do not fit are loaded with some layers on the host, or in fewer bits.


ON_DEVICE: Final = "weights_on_device_bytes"
# Memory that no formula covers: kernels' scratch memory and allocator fragments.
_MARGIN_RATIO: Final = 0.01


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model as they are loaded.

    Attributes:
        total_bytes: all weights.
        largest_block_bytes: the largest layer, which comes to the device as a whole.
        work_bytes: what a row of ``work_tokens`` tokens needs besides; it stays free.
        work_tokens: the tokens of that row.
    """

    total_bytes: int
    largest_block_bytes: int
    work_bytes: int
    work_tokens: int


@dataclass(frozen=True, slots=True)
class LighterWeights:
    """The same weights in fewer bits.

    Attributes:
        setting: the setting to change.
        value: its value.
        as_kwarg: the Python argument that sets it; None if there is none.
        need_bytes: their peak bytes during the load; None if unknown.
        why_not: why it cannot be done here; None if it can.
    """

    setting: str
    value: FactValue
    as_kwarg: str | None
    need_bytes: int | None
    why_not: str | None = None


@dataclass(frozen=True, slots=True)
class LoadModel:
    """A load of weights that did not fit.

    Attributes:
        weights: the weights; None if unknown.
        base_bytes: allocated bytes on the device before the load; None if not counted.
        host_free_bytes: host memory for offloaded layers; None if unknown.
        device: the device's name in a program.
        is_cached: whether a caching allocator is used, which reserves more than tensors need.
        why_not_on_host: why layers cannot wait on the host; None if they can.
        lighter: the weights in fewer bits, with the most bits first.
    """

    weights: Weights | None
    base_bytes: int | None
    host_free_bytes: int | None
    device: str = "0"
    is_cached: bool = False
    why_not_on_host: str | None = None
    lighter: tuple[LighterWeights, ...] = ()

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return None: each way works alone, and ``solve_together`` returns all."""
        del setting, incident
        return None

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return a patch for each way, the least costly first; each is enough alone.

        If a setting has several values (8 and 4 bits), the first that fits counts; otherwise the
        last one's reason.
        """
        ways: dict[str, Patch] = {}
        for way in self._ways(incident):
            patch = self._patch(*way, incident, policy)
            if patch.setting not in ways or ways[patch.setting].new is None:
                ways[patch.setting] = patch
        return tuple(ways.values())

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return nothing: the plan's reasons show what is missing."""
        del incident
        return ()

    def room_bytes(self, incident: Incident) -> float | None:
        """Return the bytes for weights and work together; None if the device size is unknown."""
        margin = _MARGIN_RATIO + (reserved_ratio() if self.is_cached else 0.0)
        return device_room_bytes(incident, self.base_bytes, margin)

    def _ways(self, incident: Incident) -> Iterator[tuple[str, Solution, str | None]]:
        offloaded = self._on_host(incident)
        if self.host_free_bytes is None:
            host = ""
        else:
            host = f', "cpu": {self.host_free_bytes}'
        yield (
            ON_DEVICE,
            offloaded,
            f'device_map="sequential", max_memory={{{self.device}: {offloaded.value}{host}}}',
        )
        for way in self.lighter:
            yield way.setting, self._in_fewer_bits(way, incident), way.as_kwarg

    def _on_host(self, incident: Incident) -> Solution:
        """Return the device bytes for weights, which include the largest offloaded layer."""
        weights = self.weights
        room = self.room_bytes(incident)
        if self.why_not_on_host is not None:
            return Solution(None, self.why_not_on_host)
        if weights is None:
            return Solution(None, "not known: the size of the weights by layer")
        if room is None:
            return Solution(None, "not known: how large the device is")
        share = int(room - weights.work_bytes)
        layer = weights.largest_block_bytes
        kept = share - layer
        work = format_gib(weights.work_bytes)
        left = f"{work} is kept free for a row of {weights.work_tokens} tokens"
        if kept <= 0:
            return Solution(
                None,
                f"the largest layer alone needs {format_gib(layer)}, but "
                f"{format_gib(max(0, share))} is free; {left}",
            )
        kept = min(kept, weights.total_bytes)
        waiting = weights.total_bytes - kept
        if self.host_free_bytes is not None and waiting > self.host_free_bytes:
            return Solution(
                None,
                f"{format_gib(waiting)} would wait on the host, but it has only "
                f"{format_gib(self.host_free_bytes)}",
            )
        reason = (
            f"{format_gib(kept)} of {format_gib(weights.total_bytes)} of weights stay on the "
            "device; the other layers come from the host one at a time, "
            f"{format_gib(layer)} at most; {left}"
        )
        return Solution(share, reason, waiting)

    def _in_fewer_bits(self, way: LighterWeights, incident: Incident) -> Solution:
        weights = self.weights
        room = self.room_bytes(incident)
        if way.why_not is not None:
            return Solution(None, way.why_not)
        if weights is None or room is None or way.need_bytes is None:
            return Solution(None, "not known: the size of the weights in fewer bits")
        need = way.need_bytes + weights.work_bytes
        need_text = (
            f"the weights then need {format_gib(way.need_bytes)}, and {format_gib(need)} with a "
            f"row of {weights.work_tokens} tokens"
        )
        if need > room:
            return Solution(None, f"{need_text}, but {format_gib(max(0, room))} is free")
        return Solution(
            way.value,
            f"{need_text}; {format_gib(room)} is free",
            weights.total_bytes - way.need_bytes,
        )

    @staticmethod
    def _patch(
        setting: str, solution: Solution, as_kwarg: str | None, incident: Incident, policy: Policy
    ) -> Patch:
        old = present_value(setting, incident)
        new = solution.value
        effect = effect_of(setting, old, new if new is not None else 0)
        patch = Patch(
            setting,
            old,
            new,
            effect,
            solution.reason,
            as_kwarg=None if new is None else as_kwarg,
            predicted_freed_bytes=solution.freed_bytes,
        )
        return replace(patch, blocked_by=why_blocked(patch, incident, policy))
