"""One call run whole, then in parts of as many rows as fit: finished rows are kept, the order never changes."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from oomguard.diagnosing import assess_all, default_rules
from oomguard.engines.traced_call import TracedCall
from oomguard.facts import Fact, FactValue
from oomguard.incident import Attempt, Diagnosis, Incident, Patch, SettingInForce
from oomguard.memory.derive import derive
from oomguard.memory.rows import RowsThatRan, largest_rows
from oomguard.observe import torch_memory
from oomguard.observe.exceptions import chain, exception_lines, may_be_oom
from oomguard.observe.scan import scan
from oomguard.remedy.planner import next_patch
from oomguard.remedy.policy import Policy
from oomguard.remedy.solvers import room_for_rows
from oomguard.report.note import note


class Owner(Protocol):
    """The guard, as a split run sees it."""

    policy: Policy
    attempts: tuple[Attempt, ...]

    def record(self, attempt: Attempt) -> None: ...  # noqa: D102
    def incident(self, diagnosis: Diagnosis) -> None: ...  # noqa: D102
    def patched(self, patch: Patch) -> None: ...  # noqa: D102


class SplitRun:
    """One call under the guard: run whole, then in parts of as many rows as fit; finished rows are kept."""

    def __init__(self, owner: Owner, wrapped: Callable[..., Any], call: Any) -> None:
        self._owner, self._wrapped, self._call = owner, wrapped, call
        self._rows: int = call.rows
        self._size: int = call.rows
        self._whole: Any = None
        self._done: list[Any] = []
        self._next_row = 0
        self._attempts: list[Attempt] = []
        self._pending: tuple[Patch, ...] = ()
        self._tried: set[tuple[str, FactValue]] = set()
        self._not_splittable: str | None = call.not_splittable
        self._traced: TracedCall | None = None
        self._ran = RowsThatRan()
        self._base_bytes = 0
        self._room_bytes: float | None = None
        self._peak_bytes: int | None = None
        self._first_error: BaseException | None = None
        self._incident: Incident | None = None

    def run(self) -> tuple[Any, BaseException | None]:
        """The call's result and None, or None and the exception to raise."""
        import tenacity

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(1 + self._owner.policy.max_relaunches),
            retry=tenacity.retry_if_result(lambda finished: not finished and bool(self._pending)),
            retry_error_callback=lambda _state: False,
        )
        try:
            if retrying(self._attempt):
                return (self._call.merge(self._done) if self._done else self._whole), None
            if self._first_error is not None and self._incident is not None:
                annotate(self._first_error, self._incident, self._attempts)
            return None, self._first_error
        finally:
            # tenacity's own cycles keep this object until a collection: it must not keep the user's tensors as long.
            self._whole = self._call = self._first_error = self._traced = None
            self._wrapped = _finished
            self._done = []

    def _attempt(self) -> bool:
        """Run the rows that are left; False where one part failed."""
        started = time.monotonic()
        patches, self._pending = self._pending, ()
        self._peak_bytes = None
        failed = self._run_whole() if self._size >= self._rows else self._run_parts()
        # Parts that were measured made room for larger ones: the last size is the one that holds.
        settings: dict[str, FactValue] = {"batch_size": self._size}
        peak = self._peak_bytes
        measured: dict[str, float] = {} if peak is None else {"peak_bytes": peak}
        incident = None if failed is None else self._remedy(failed)
        error = "" if failed is None else type(failed).__name__
        seconds = time.monotonic() - started
        number = len(self._attempts) + 1
        attempt = Attempt(number, settings, patches, incident, error=error, seconds=seconds, measured=measured)
        self._attempts.append(attempt)
        self._owner.record(attempt)
        return failed is None

    def _run_whole(self) -> BaseException | None:
        """The call as the user made it, its result as it is."""
        torch_memory.reset_peak()
        self._whole, error = _guarded(self._wrapped, self._call.args, self._call.kwargs)
        self._peak_bytes = torch_memory.peak_bytes()
        return error

    def _run_parts(self) -> BaseException | None:
        while self._next_row < self._rows:
            stop = min(self._rows, self._next_row + self._size)
            before = torch_memory.live_bytes(self._call.model)
            torch_memory.reset_peak()
            part, error = _guarded(self._wrapped, *self._call.part(self._next_row, stop))
            peak = torch_memory.peak_bytes()
            self._peak_bytes = peak if peak is None else max(peak, self._peak_bytes or 0)
            if error is not None:
                self._ran.failed(stop - self._next_row)
                return error
            problem = self._call.problem(part, stop - self._next_row)
            if problem is not None:
                # Its parts cannot be put together: what is raised is the failure that led here.
                self._not_splittable = problem
                return self._first_error
            self._done.append(part)
            self._learn(stop - self._next_row, before, peak)
            self._next_row = stop
        return None

    def _learn(self, rows: int, before: int | None, peak: int | None) -> None:
        """From what a part took, how many rows the next one may have; where the call was traced that is known already."""
        if self._traced is not None or before is None or peak is None or self._room_bytes is None:
            return
        self._ran.add(rows, peak - before)
        # The results of finished parts are alive too.
        held = (torch_memory.live_bytes(self._call.model) or before) - self._base_bytes
        room = self._room_bytes - held
        self._size = min(self._rows, self._ran.rows_within(round(room)))

    def _remedy(self, error: BaseException) -> Incident | None:
        """Diagnose a failure and choose the next size; what is to be raised in the end is the first failure."""
        in_force = {"batch_size": SettingInForce("batch_size", self._size, None, "given")}
        scanned = scan_error(error, in_force)
        if scanned.first_cause is None:
            self._first_error, self._incident = error, None  # no memory failure: not ours to explain or to replace
            return None
        self._first_error = self._first_error or error
        clear(error)
        torch_memory.release()
        given = self._facts(scanned.first_cause)
        # A size that has failed is never planned again; one that ran is, for rows that turned out heavier.
        self._tried.add(("batch_size", min(self._size, self._rows - self._next_row)))
        diagnosis = assess_all(scanned, default_rules(), self._owner.policy, self._tried, given=given)
        incident = diagnosis.incidents[0]
        if self._not_splittable is not None:
            blocked = [
                replace(p, blocked_by=self._not_splittable) if p.setting == "batch_size" else p for p in incident.plan
            ]
            incident = replace(incident, plan=tuple(blocked))
            diagnosis = replace(diagnosis, incidents=(incident, *diagnosis.incidents[1:]))
        self._incident = incident
        self._owner.incident(diagnosis)
        patch = next_patch(incident)
        is_left = len(self._attempts) < self._owner.policy.max_relaunches
        if is_left and patch is not None and patch.setting == "batch_size" and isinstance(patch.new, int):
            self._apply(patch, patch.new, incident)
        return incident

    def _apply(self, patch: Patch, size: int, incident: Incident) -> None:
        from oomguard.log import get_logger

        self._owner.patched(patch)
        self._size, self._pending = size, (patch,)
        rows = f"{patch.old} -> {size}"
        get_logger().info("splitting the batch", rows=rows, kind=incident.kind, done=self._next_row)

    def _facts(self, failure: Incident) -> dict[str, Fact]:
        """What the call knows of itself, and how many rows fit by a trace of it or what each held when it failed."""
        call, rows = self._call, min(self._size, self._rows - self._next_row)
        base = torch_memory.live_bytes(call.model)
        values: dict[str, FactValue | None] = {
            "batch_size": rows, "prompt_tokens": call.prompt_tokens, "max_new_tokens": call.max_new_tokens, "baseline_bytes": base,
            "row_bytes_at_failure": row_bytes_at_failure(failure, base, rows), "caching_allocator": torch_memory.is_cached(),
        }  # fmt: skip
        facts = {name: Fact(name, value, "measured") for name, value in values.items() if value is not None}
        known = derive(replace(failure, facts={**facts, **failure.facts}))
        self._base_bytes, self._room_bytes = base or 0, room_for_rows(known)
        # Where a size that the trace gave has failed, it is wrong for this call, and what is measured counts.
        self._traced = None if self._attempts or self._not_splittable else call.traced()
        if self._traced is not None:
            kept = call.result_row_bytes
            found = traced_facts(known, self._traced, rows, lambda number: (self._rows - number) * kept)
            if not found:
                self._traced = None
            facts |= found
        return facts


def traced_facts(
    known: Incident, traced: TracedCall, rows: int, beside: Callable[[int], int] = lambda _rows: 0
) -> dict[str, Fact]:
    """How many rows of a failed call of ``rows`` fit, by a trace of it; empty where that cannot be told.

    ``beside`` is what else is alive, by the number of rows: the results of the other ones.
    """
    room = room_for_rows(known, traced=True)
    if room is None:
        return {}
    free = round(room)

    def need(number: int) -> int | None:
        own = traced.need_bytes(number, free - beside(number))
        return None if own is None else own + beside(number)

    found = largest_rows(need, free, rows)
    names = ("traced_rows", "traced_peak_bytes")
    return {} if found is None else {n: Fact(n, value, "traced") for n, value in zip(names, found, strict=True)}


def _finished() -> None:
    """Stands where the function of a finished run was."""


def _guarded(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, BaseException | None]:
    """The function's result and None, or None and its exception, whose traceback starts at the function's own frames."""
    try:
        return function(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001 - judged by the caller, and raised again unless it is remedied
        trace = error.__traceback__
        return None, error.with_traceback(trace.tb_next if trace is not None else None)


def row_bytes_at_failure(failure: Incident, base: int | None, rows: int) -> int | None:
    """Bytes that one row held when the call failed, from the live bytes in the message; it would have gone on to more."""
    tried = failure.number("tried_bytes")
    live = failure.number("allocated_bytes") or failure.number("process_in_use_bytes")
    if base is None or tried is None or live is None:
        return None
    return max(1, round((live + tried - base) / rows))


def scan_error(error: BaseException, settings: Mapping[str, SettingInForce] | None = None) -> Diagnosis:
    """What an exception's messages say, not yet explained; no incidents where its type cannot be a memory failure."""
    if not may_be_oom(error):
        return Diagnosis(type(error).__name__)
    return scan(exception_lines(error), default_rules(), type(error).__name__, given=settings)


def clear(error: BaseException) -> None:
    """Drop the locals of the frames in an exception's traceback and its chain: they hold the failed call's tensors."""
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)


def annotate(error: BaseException, incident: Incident, attempts: Sequence[Attempt] = ()) -> None:
    """Add the diagnosis to an exception's notes, and mark it as explained."""
    with contextlib.suppress(AttributeError, TypeError):
        error.add_note(note(incident, attempts))
        error.__oomguard__ = True  # type: ignore[attr-defined]
