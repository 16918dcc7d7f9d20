"""One call run whole, then in parts of as many rows as fit: finished rows are kept, the order never changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from oomguard.attempting.ledger import Ledger
from oomguard.diagnosing import default_rules
from oomguard.engines.protocol import WatchedCall
from oomguard.facts import Fact
from oomguard.guarding.failure import annotate, clear, row_bytes_at_failure, scan_error
from oomguard.incident import Attempt, Diagnosis, Incident, Patch, SettingInForce
from oomguard.memory.generate.rows import RowsThatRan
from oomguard.observe import torch_memory
from oomguard.remedy.modelled_call import CallModel
from oomguard.remedy.policy import Policy


class Owner(Protocol):
    """The guard, as a split run sees it."""

    policy: Policy

    def record(self, attempt: Attempt) -> None: ...  # noqa: D102
    def incident(self, diagnosis: Diagnosis) -> None: ...  # noqa: D102
    def patched(self, patch: Patch) -> None: ...  # noqa: D102


class SplitRun:
    """One call under the guard: run whole, then in parts of as many rows as fit; finished rows are kept.

    Args:
        owner: the guard in force, which is told of each attempt, incident and patch.
        wrapped: the engine's own function, or the user's.
        call: one call of it, as it was made.
    """

    def __init__(self, owner: Owner, wrapped: Callable[..., Any], call: WatchedCall) -> None:
        self._owner, self._wrapped, self._call = owner, wrapped, call
        self._rows: int = call.rows
        self._size: int = call.rows
        self._whole: Any = None
        self._done: list[Any] = []
        self._next_row = 0
        self._ledger = Ledger(owner.policy, {"batch_size": call.rows})
        self._not_splittable: str | None = call.not_splittable
        self._is_traced = False
        self._ran = RowsThatRan()
        self._base_bytes = 0
        self._room_bytes: float | None = None
        self._peak_bytes: int | None = None
        self._first_error: BaseException | None = None
        self._incident: Incident | None = None

    def run(self, failed: BaseException | None = None) -> tuple[Any, BaseException | None]:
        """Return the call's result and None, or None and the exception to raise.

        ``failed`` is the exception of the whole call, where it has been run already.
        """
        self._first_error = failed
        for _ in self._ledger.rounds():
            for patch in self._ledger.patches:
                self._apply(patch)
            if self._attempt():
                return (self._call.merge(self._done) if self._done else self._whole), None
        if self._first_error is not None and self._incident is not None:
            annotate(self._first_error, self._incident, self._ledger.attempts)
        return None, self._first_error

    def _attempt(self) -> bool:
        """Run the rows that are left; return False where one part failed."""
        self._peak_bytes = None
        failed = self._run_whole() if self._size >= self._rows else self._run_parts()
        # Parts that were measured made room for larger ones: the last size is the one that holds.
        self._ledger.settings["batch_size"] = self._size
        peak = self._peak_bytes
        incident = None if failed is None else self._explain(failed)
        error = "" if failed is None else type(failed).__name__
        attempt = self._ledger.end(incident, error=error, measured={} if peak is None else {"peak_bytes": peak})
        self._owner.record(attempt)
        if incident is not None:
            self._ledger.choose(incident, lambda name: name == "batch_size")
        return failed is None

    def _run_whole(self) -> BaseException | None:
        """Run the call as the user made it, unless it has been run, and keep its result as it is."""
        if self._first_error is not None:
            return self._first_error
        torch_memory.reset_peak()
        self._whole, error = run_guarded(self._wrapped, self._call.args, self._call.kwargs)
        self._peak_bytes = torch_memory.peak_bytes()
        return error

    def _run_parts(self) -> BaseException | None:
        while self._next_row < self._rows:
            stop = min(self._rows, self._next_row + self._size)
            before = torch_memory.live_bytes(self._call.model)
            torch_memory.reset_peak()
            part, error = run_guarded(self._wrapped, *self._call.part(self._next_row, stop))
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
        """Set the rows of the next part from what this one took, unless a trace of the call has told them."""
        if self._is_traced or before is None or peak is None or self._room_bytes is None:
            return
        self._ran.add(rows, peak - before)
        # The results of finished parts are alive too.
        held = (torch_memory.live_bytes(self._call.model) or before) - self._base_bytes
        room = self._room_bytes - held
        self._size = min(self._rows, self._ran.rows_within(round(room)))

    def _explain(self, error: BaseException) -> Incident | None:
        """Diagnose a failure and plan for it; None where it is no memory failure. The first one is what is raised in the end."""
        in_force = {"batch_size": SettingInForce("batch_size", self._size, None, "given")}
        scanned = scan_error(error, in_force)
        if scanned.first_cause is None:
            self._first_error, self._incident = error, None  # no memory failure: not ours to explain or to replace
            return None
        self._first_error = self._first_error or error
        clear(error)
        torch_memory.release()
        model = self._model(scanned.first_cause)
        # A size that ran may be planned again, for rows that turned out heavier; one that failed may not.
        diagnosis = self._ledger.diagnose(
            scanned, default_rules(), failed_with={"batch_size": model.rows}, given=self._facts(model), behind=model
        )
        incident = diagnosis.first_cause or scanned.first_cause
        self._base_bytes, self._room_bytes = model.base_bytes or 0, model.room_bytes(incident)
        self._is_traced = model.is_traced
        self._incident = incident
        self._owner.incident(diagnosis)
        return incident

    def _model(self, failure: Incident) -> CallModel:
        """Return the model behind the failure: the call's trace, and what its rows held."""
        call, rows = self._call, min(self._size, self._rows - self._next_row)
        base = torch_memory.live_bytes(call.model)
        # Where a size that the trace gave has failed, it is wrong for this call, and what is measured counts.
        is_first = not self._ledger.attempts and self._not_splittable is None
        return CallModel(
            rows,
            base,
            seen_row_bytes=row_bytes_at_failure(failure, base, rows),
            trace=call.traced() if is_first else None,
            total_rows=self._rows,
            result_row_bytes=call.result_row_bytes,
            is_cached=torch_memory.is_cached(),
            not_splittable=self._not_splittable,
        )

    def _facts(self, model: CallModel) -> dict[str, Fact]:
        """Return what rules and reports may know of the call."""
        values = {
            "batch_size": model.rows,
            "prompt_tokens": self._call.prompt_tokens,
            "max_new_tokens": self._call.max_new_tokens,
            "baseline_bytes": model.base_bytes,
        }
        return {name: Fact(name, value, "measured") for name, value in values.items() if value is not None}

    def _apply(self, patch: Patch) -> None:
        from oomguard.log import get_logger

        assert isinstance(patch.new, int)  # noqa: S101 - a number of rows
        self._owner.patched(patch)
        self._size = patch.new
        rows, kind = f"{patch.old} -> {patch.new}", self._incident.kind if self._incident else None
        get_logger().info("splitting the batch", rows=rows, kind=kind, done=self._next_row)


def run_guarded(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, BaseException | None]:
    """Return the function's result and None, or None and its exception with a traceback that starts at its own frames."""
    try:
        return function(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001 - judged by the caller, and raised again unless it is remedied
        trace = error.__traceback__
        return None, error.with_traceback(trace.tb_next if trace is not None else None)
