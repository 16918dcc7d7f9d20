"""Run a call whole, and then in parts; the first part is small and is the measurement.

Its peak above the baseline, per row, gives the size of the next parts, and later parts refine it.
Finished rows are kept, and the order never changes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

from oomguard.core.errors import Partial
from oomguard.core.facts import FactValue
from oomguard.core.incident import Effect, Incident, Patch, SettingInForce
from oomguard.core.log import get_logger, get_plain_logger
from oomguard.core.settings import effect_of
from oomguard.engines.protocol import ReadCall, WatchedCall
from oomguard.engines.registry import held_results_bytes, move_results
from oomguard.guarding import concurrency
from oomguard.guarding.collate import OutputCollector
from oomguard.guarding.failure import (
    WHY_NOT,
    GradientRecorded,
    add_note,
    annotate,
    clear,
    facts_of,
    forget,
    frames_of,
    in_phase,
    is_out_of_memory,
    let_go,
    refusing_gradients,
    release_after,
    row_bytes_at_failure,
    run_guarded,
    scan_error,
    trains,
)
from oomguard.guarding.intercept import GuardEvents
from oomguard.probe import torch_memory
from oomguard.remedy.failed_call import BATCH_MARGIN_RATIO, CACHE, CHUNK, VARIED, CallModel, Variant
from oomguard.retry import Ledger
from oomguard.scan.exceptions import may_be_oom

# Arguments that a call changes as it runs, and that cannot be restored.
_FILLED: Final = (
    "cache",
    "past_key_values",
    "cache_params",
    "streamer",
    "prefix_allowed_tokens_fn",
)
_LISTS: Final = ("logits_processor", "stopping_criteria")


@dataclass(frozen=True, slots=True)
class RngState:
    """The states of torch's random generators by device type; empty if torch is not loaded."""

    states: Mapping[str, Any]

    @classmethod
    def now(cls) -> RngState:
        """Record the present states of the CPU and, if in use, of CUDA devices."""
        torch = sys.modules.get("torch")
        if torch is None:
            return cls({})
        states: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
        return cls(states)

    def put_back(self) -> None:
        """Restore the recorded states."""
        torch = sys.modules.get("torch")
        if torch is None or not self.states:
            return
        torch.set_rng_state(self.states["cpu"])
        if "cuda" in self.states:
            torch.cuda.set_rng_state_all(self.states["cuda"])


def may_begin_in_parts(arguments: Mapping[str, Any], puts_back: Collection[str] = ()) -> bool:
    """Return whether a call may run whole after some of its parts ran.

    It may not if the parts may have changed an object of the user. ``puts_back`` are the arguments
    that the call itself restores.
    """
    for name in _FILLED:
        if name not in puts_back and arguments.get(name) is not None:
            return False
    # A processor or criterion of the user's own may count its calls; transformers' own do not.
    for name in _LISTS:
        for entry in _entries(arguments.get(name)):
            if type(entry).__module__.partition(".")[0] != "transformers":
                return False
    return True


def _entries(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if value is None:
        return []
    return [value]


def partial_of(gathered: OutputCollector) -> Partial | None:
    """Return the joined finished rows of a call; None before the first, or if joining fails."""
    if not gathered.done:
        return None
    finished, error = run_guarded(gathered.finished, (), {})
    if error is None:
        return Partial(gathered.rows, gathered.done, finished)
    return None


def leave_in(error: BaseException, partial: Partial | None, why_whole: str | None) -> BaseException:
    """Return an exception with the reason why its call was not split, and the finished rows."""
    if why_whole is not None and why_whole not in "".join(getattr(error, "__notes__", ())):
        add_note(error, f"oomguard: not run in parts: {why_whole}")
    if partial is not None:
        keep_in(error, partial)
        done = f"{partial.done} of {partial.rows} rows are done"
        add_note(error, f"oomguard: {done}: this exception's `partial` has them")
    return error


def keep_in(error: BaseException, partial: Partial) -> None:
    """Set an exception's ``partial`` to the finished rows, unless it has such an attribute."""
    # An exception of the user may have an attribute of this name, or accept none.
    if not hasattr(error, "partial"):
        with contextlib.suppress(AttributeError, TypeError):
            error.partial = partial  # type: ignore[attr-defined]


def report_mistake(mistake: BaseException, failure: BaseException | None) -> None:
    """Log a bug in oomguard, and add a note about it to the call's failure, if there is one."""
    get_plain_logger().error("the call could not be split", exc_info=mistake)
    if failure is not None:
        why = f"a bug in oomguard: {type(mistake).__name__}: {mistake}"
        add_note(failure, f"oomguard: not run in parts: {why}")


# If results are smaller than this fraction of the failed allocation, moving them does not help.
_PARKED_SHARE: Final = 16


def make_room(error: BaseException, gathered: OutputCollector, call: WatchedCall) -> bool:
    """Move results to the host, or wait for other calls; return whether the call may run again."""
    # Moving results takes less time than waiting for the calls of other threads.
    return _move_results(error, gathered) or (
        call.not_splittable is None and concurrency.have_ended(error, call.model)
    )


def _move_results(error: BaseException, gathered: OutputCollector) -> bool:
    own = gathered.device_bytes
    earlier = held_results_bytes()
    if (own or earlier) and may_be_oom(error):
        failure = scan_error(error).first_cause
    else:
        failure = None
    if failure is None or (own + earlier) * _PARKED_SHARE < (failure.number("tried_bytes") or 0):
        return False
    clear(error)
    failed = []
    for move, size in ((gathered.park, own), (move_results, earlier)):
        if size:
            failed.append(run_guarded(move, (), {})[1])
    torch_memory.release()
    if earlier and not any(failed):
        get_logger().warning("moved results of earlier batches to the host", size_bytes=earlier)
    return not any(failed)


def run_rows(
    wrapped: Callable[..., Any], call: WatchedCall, start: int, stop: int
) -> tuple[Any, BaseException | None]:
    """Return the result of rows ``start`` to ``stop`` and None, or None and the exception.

    Running out of memory while the rows are cut counts as a failure of the rows.

    Raises:
        Exception: a bug in oomguard, in the code that cuts the rows.
    """
    given, error = run_guarded(call.part, (start, stop), {})
    if error is None:
        args, kwargs = given
        return run_guarded(wrapped, args, kwargs)
    if not may_be_oom(error):
        raise error
    return None, error


# Later rows may need more, so a part has at most so many times the rows of the largest before it.
_MOST_GROWTH: Final = 8
# One part is a weak measurement: without padding, for example, it needs no mask. A part of one row
# is weaker still.
_ONE_PART_MARGIN_RATIO: Final = 0.06
_ONE_ROW_MARGIN_RATIO: Final = 0.12
# The ratio for rows that failed although the measurement said that they fit.
_BELOW_FAILED_RATIO: Final = 0.9


class RowMeasurements:
    """The measurements of a call's parts.

    Attributes:
        most_rows: the most rows that ran together.
        row_bytes: the most bytes per row among them; 0 if unknown.
    """

    def __init__(self) -> None:
        self.most_rows = 0
        self.row_bytes = 0.0
        self._taken_bytes: dict[int, int] = {}
        self._limit_rows: int | None = None

    def add(self, rows: int, before_bytes: int | None, peak_bytes: int | None) -> None:
        """Record rows that ran, with the allocated bytes before them and at their peak."""
        self.most_rows = max(self.most_rows, rows)
        if before_bytes is None or peak_bytes is None:
            return
        taken = peak_bytes - before_bytes
        self.row_bytes = max(self.row_bytes, taken / rows)
        self._taken_bytes[rows] = max(taken, self._taken_bytes.get(rows, 0))

    def failed(self, rows: int) -> None:
        """Record rows that ran out of memory together; earlier measurements are dropped."""
        limit = max(1, int(rows * _BELOW_FAILED_RATIO))
        if self._limit_rows is None:
            self._limit_rows = limit
        else:
            self._limit_rows = min(self._limit_rows, limit)
        # They said that these rows fit, so they are wrong.
        self._taken_bytes.clear()
        self.most_rows = 0
        self.row_bytes = 0.0

    def rows_within(self, room_bytes: float) -> int | None:
        """Return how many rows fit in ``room_bytes``; None before the first measurement.

        With two parts the estimate is linear, through the two largest; with one it is proportional,
        with a margin. It is at most eight times the largest part, and below the rows that failed.
        """
        if not self._taken_bytes:
            return None
        (rows, taken), *smaller = sorted(self._taken_bytes.items(), reverse=True)
        slope = max(size / number for number, size in self._taken_bytes.items())
        if not smaller and rows == 1:
            slope *= 1 + _ONE_ROW_MARGIN_RATIO
        elif not smaller:
            slope *= 1 + _ONE_PART_MARGIN_RATIO
        # The parts share a fixed cost, such as a mask, which the slope between two leaves out.
        if smaller and smaller[0][1] < taken:
            slope = (taken - smaller[0][1]) / (rows - smaller[0][0])
        found = rows + int((room_bytes - taken) // max(1.0, slope))
        if self._limit_rows is None:
            limit = found
        else:
            limit = self._limit_rows
        return max(1, min(found, _MOST_GROWTH * rows, limit))


_MESSAGES: Final[Mapping[str, tuple[str, str]]] = {
    "attn_implementation": ("running attention without a score matrix", "attention"),
    CHUNK: ("processing the prompt in chunks", "tokens"),
    CACHE: ("keeping the KV cache in another way", "cache"),
    "max_new_tokens": ("cutting the answers", "tokens"),
    "truncate_prompt_tokens": ("cutting the prompts", "tokens"),
}


class ChangedCall:
    """A call with its changed settings.

    Attributes:
        made: the call as the user made it.
        call: the call with the changes.
        settings: the changed settings.
    """

    def __init__(self, made: WatchedCall) -> None:
        self.made = self.call = made
        self.settings: dict[str, FactValue] = {}
        self._failed_in: frozenset[str] | None = None
        self._refused: dict[str, str] = {}

    def failed(self, error: BaseException) -> None:
        """Record the functions in a failure's traceback; only those in all failures count."""
        functions = frozenset(frame.f_code.co_name for frame in frames_of(error))
        if self._failed_in is None:
            self._failed_in = functions
        else:
            self._failed_in = self._failed_in & functions

    def change(self, setting: str, value: FactValue) -> None:
        """Change one more setting, if possible."""
        changed = self._with(setting, value)
        if isinstance(changed, str):
            self._refused[setting] = changed
        else:
            self.call, self.settings[setting] = changed, value

    def take_back(self, why: str) -> dict[str, FactValue]:
        """Undo all changes, and return them."""
        self._refused.update(dict.fromkeys(self.settings, f"with it: {why}"))
        changed = self.settings
        self.call = self.made
        self.settings = {}
        return changed

    @property
    def lasting(self) -> dict[str, FactValue]:
        """The changes with which later calls may begin: those that keep outputs the same."""
        preserving = {}
        for name, v in self.settings.items():
            if effect_of(name, None, v) is Effect.OUTPUT_PRESERVING:
                preserving[name] = v
        return preserving

    def variants(self) -> dict[str, Variant]:
        """Return the possible variants; empty if the prompt's length is unknown."""
        prompt = self.made.prompt_tokens
        new = self.made.max_new_tokens
        if prompt is None:
            return {}
        now: dict[str, FactValue | None] = {
            CHUNK: prompt,
            "max_new_tokens": new,
            "truncate_prompt_tokens": prompt,
        }
        now.update(self.settings)
        return {name: self._variant(name, now.get(name)) for name in VARIED}

    def _variant(self, name: str, now: FactValue | None) -> Variant:
        def why_not(value: FactValue) -> str | None:
            if name in self._refused:
                return self._refused[name]
            changed = self._with(name, value)
            if isinstance(changed, str):
                return changed
            return None

        def row_bytes(value: FactValue) -> int | None:
            changed = self._with(name, value)
            if isinstance(changed, str):
                return None
            return changed.estimated_row_bytes

        return Variant(now, why_not, row_bytes, is_changed=name in self.settings)

    def _with(self, name: str, value: FactValue) -> WatchedCall | str:
        return self.made.varied({**self.settings, name: value}, self._failed_in)


def log_patch(patch: Patch, kind: str | None, done: int) -> None:
    """Log a change, and how many rows were finished before it."""
    if patch.setting in _MESSAGES:
        message, name = _MESSAGES[patch.setting]
        get_logger().warning(message, **{name: patch.new}, kind=kind, done=done)
    else:
        get_logger().info(
            "splitting the batch", rows=f"{patch.old} -> {patch.new}", kind=kind, done=done
        )


# Results that need more than this fraction of the free memory move to the host.
_RESULTS_SHARE: Final = 4
_FEWER_RESULTS: Final = (
    "Put the call, and what you compute from it, into one function under "
    "@oomguard.guard(batch=NAME) and @torch.inference_mode(). NAME is the argument with one entry "
    "per row. Return one small result per row, such as its loss"
)


class MicroBatchRun:
    """A call under the guard: run whole, and then in parts with as many rows as fit.

    Args:
        owner: the guard, which records each attempt, incident and patch.
        wrapped: the engine's function, or the user's.
        call: the call as the user made it.
    """

    def __init__(self, owner: GuardEvents, wrapped: Callable[..., Any], call: WatchedCall) -> None:
        self._owner = owner
        self._wrapped = wrapped
        self._changed = ChangedCall(call)
        self._rows = self._size = self._begun = call.rows
        self._whole: Any = None
        self._gathered = OutputCollector.of(self._changed.made)
        self._next_row = self._base_bytes = 0
        self._ledger = Ledger(owner.policy, {"batch_size": call.rows})
        self._not_splittable: str | None = call.not_splittable
        self._measured = RowMeasurements()
        self._generators = RngState({})
        unknown: float | None = None
        self._room_bytes = self._peak_bytes = self._seconds = unknown
        self._first_error: BaseException | None = None
        self._part_error: str | None = None
        self._why_not_joined: str | None = None
        self._incident: Incident | None = None

    def run(
        self,
        failed: list[BaseException] | None = None,
        *,
        seconds: float | None = None,
        measured: Mapping[str, float] | None = None,
    ) -> tuple[Any, BaseException | None]:
        """Return the call's result and None, or None and the exception to raise.

        ``failed`` holds the exception of the whole call; None: it has not run. The list is emptied,
        because no frame may keep the exception.
        """
        if failed:
            self._first_error = failed.pop()
        else:
            self._first_error = None
        self._peak_bytes = (measured or {}).get("peak_bytes")
        self._seconds = seconds
        if self._first_error is None:
            self._begin()
        try:
            for _ in self._ledger.rounds():
                for patch in self._ledger.patches:
                    self._apply(patch)
                if self._attempt():
                    return self._joined()
            return None, self._given_up()
        except BaseException as stop:
            # Also for a bug in oomguard, the finished rows stay available.
            partial = partial_of(self._gathered)
            self._owner.ended((), partial)
            if partial is not None:
                keep_in(stop, partial)
            if self._first_error is None or not isinstance(stop, Exception):
                raise
            report_mistake(stop, self._first_error)
            return None, self._given_up()
        finally:
            # The exception's frames refer to this object, so both would live until a garbage
            # collection.
            self._first_error = None

    def _begin(self) -> None:
        """Begin with the batch size of earlier calls, and with the memory that is free now."""
        self._base_bytes = torch_memory.live_bytes(self._call.model) or 0
        free = torch_memory.free_bytes()
        if not self._owner.known or not may_begin_in_parts(self._call.kwargs, self._call.puts_back):
            return
        self._generators = RngState.now()
        self._size = self._begun = self._owner.known.begin(self._call, free)
        self._ledger.settings["batch_size"] = self._size
        if self._size < self._rows:
            # The known size was measured without results on the device.
            self._gathered.park()
        for name, value in self._owner.known.varied(self._call).items():
            self._changed.change(name, value)
        if free is None:
            self._room_bytes = None
        else:
            self._room_bytes = free * (1 - BATCH_MARGIN_RATIO)

    def _attempt(self) -> bool:
        """Run the remaining rows; return False if a part failed."""
        if self._ledger.attempts:
            self._peak_bytes = self._seconds = None
        self._ledger.settings.update(self._changed.settings)
        if self._size >= self._rows:
            failed = self._run_whole()
        else:
            failed = self._run_parts()
        # Measured parts may have led to larger ones, so the last size counts.
        self._ledger.settings["batch_size"] = self._size
        if self._peak_bytes is None:
            measured = {}
        else:
            measured = {"peak_bytes": self._peak_bytes}
        if failed is None:
            incident = None
        else:
            incident = self._explain(failed)
        if failed is None:
            error = ""
        else:
            error = self._part_error or type(failed).__name__
        ended = self._ledger.end(incident, error=error, seconds=self._seconds, measured=measured)
        is_changed = self._first_error is not None or self._changed.settings or self._gathered.done
        self._owner.record(ended, is_healthy=not is_changed)
        if incident is not None:
            self._ledger.choose(incident, lambda name: name == "batch_size" or name in VARIED)
        return failed is None

    def _run_whole(self, *, again: bool = False) -> BaseException | None:
        """Run the call as the user made it, or its variant, unless it has run already.

        ``again``: it has begun before.
        """
        if self._changed.settings:
            return self._run_changed()
        error = self._first_error
        if again or error is not None:
            around = self._call.around(0, self._rows)
        else:
            around = nullcontext()
        while error is None or make_room(error, self._gathered, self._call):
            with torch_memory.MemoryPeak() as measured, around:
                self._whole, error = run_guarded(self._wrapped, self._call.args, self._call.kwargs)
            self._peak_bytes = measured.bytes
            if error is None:
                self._gathered = OutputCollector(self._rows)
                if self._owner.known:
                    self._measured.add(self._rows, self._base_bytes, self._peak_bytes)
                return None
            # Repeat the failed call's random draws.
            around = self._call.around(0, self._rows)
        return error

    def _run_changed(self) -> BaseException | None:
        """Run all rows as a variant; return the failure if it ran out of memory too."""
        with torch_memory.MemoryPeak() as measured, self._call.around(0, self._rows):
            self._whole, error = run_guarded(self._wrapped, self._call.args, self._call.kwargs)
        self._peak_bytes = measured.bytes
        if error is not None and is_out_of_memory(error):
            return error
        if error is not None:
            why: str | None = f"{type(error).__name__}: {error}"
        else:
            why = self._call.problem(self._whole, self._rows)
        if why is None:
            self._whole = self._call.completed(self._whole, 0, self._rows)
            # The whole result includes its rows.
            self._gathered = OutputCollector(self._rows)
            return None
        self._ledger.forget(self._changed.take_back(why))
        self._generators.put_back()
        return self._run_whole(again=True)

    def _run_parts(self) -> BaseException | None:
        while self._next_row < self._rows:
            stop = min(self._rows, self._next_row + self._size)
            # Cached blocks of another part size are too small for this part's tensors.
            torch_memory.empty_cache()
            rows = stop - self._next_row
            ran_beside_others = concurrency.others_run()
            before = torch_memory.live_bytes()
            refusing = refusing_gradients(really=self._call.may_train)
            with (
                torch_memory.MemoryPeak() as measured,
                refusing,
                self._call.around(self._next_row, stop),
            ):
                part, error = run_rows(self._wrapped, self._call, self._next_row, stop)
            peak = measured.bytes
            if peak is None:
                self._peak_bytes = peak
            else:
                self._peak_bytes = max(peak, self._peak_bytes or 0)
            if error is not None:
                problem = None
            else:
                problem = self._call.problem(part, rows)
            if problem is not None:
                # No finished row is usable.
                self._gathered = OutputCollector(self._rows)
                self._next_row = 0
            elif error is None:
                problem, error = run_guarded(self._gathered.take, (self._call, part, rows), {})
            del part
            if problem is not None:
                return self._as_it_was_made(problem)
            if error is not None and make_room(error, self._gathered, self._call):
                continue
            if error is not None:
                return self._failed_in_part(error, stop)
            # Another thread's memory would count as this part's.
            if ran_beside_others or concurrency.others_run():
                before = peak = None
            self._measured.add(rows, before, peak)
            self._next_row = stop
            self._resize(before)
        return None

    def _failed_in_part(self, error: BaseException, stop: int) -> BaseException | None:
        """Return the failure that decides: the part's, or the whole call's."""
        if isinstance(error, GradientRecorded):
            forget(error)
            return self._as_it_was_made(str(error))
        if is_out_of_memory(error):
            self._measured.failed(stop - self._next_row)
            return error
        if self._first_error is None and stop - self._next_row >= self._begun:
            # Earlier calls ran in parts of this size.
            return error
        self._part_error = type(error).__name__
        forget(error)
        return self._as_it_was_made(
            f"rows {self._next_row} to {stop} alone raised {self._part_error}: {error}"
        )

    def _as_it_was_made(self, why_not: str) -> BaseException | None:
        """Return the failure of the whole call, which runs now if it has not run."""
        self._not_splittable = why_not
        self._size = self._rows
        self._ledger.forget(self._changed.take_back(why_not))
        if self._first_error is None:
            self._owner.known.forget(self._call)
            self._gathered = OutputCollector(self._rows)
            self._next_row = 0
            self._part_error = None
            self._generators.put_back()
        return self._run_whole(again=True)

    def _resize(self, before_bytes: int | None) -> None:
        """Set the rows of the next part from the measurements; large results move to the host."""
        if before_bytes is None or self._room_bytes is None:
            return
        if self._gathered.device_bytes * _RESULTS_SHARE > self._room_bytes:
            self._gathered.park()
        held = (torch_memory.live_bytes() or before_bytes) - self._base_bytes
        rows = self._measured.rows_within(self._room_bytes - held)
        if rows is not None:
            self._size = min(self._rows, rows)

    def _explain(self, error: BaseException) -> Incident | None:
        """Diagnose a failure and plan for it; None if memory did not run out.

        The first failure is the one that is raised in the end.
        """
        if self._first_error in (None, error):
            self._report_split(error)
        if self._not_splittable is None:
            size = self._size
        else:
            size = self._rows
        scanned = scan_error(
            error, {"batch_size": SettingInForce("batch_size", size, None, "given")}
        )
        if (failure := scanned.first_cause) is None:
            # Another failure is raised unchanged.
            self._first_error = error
            self._incident = None
            return None
        self._first_error = self._first_error or error
        self._changed.failed(error)
        if self._call.may_train and trains(error):
            self._not_splittable = WHY_NOT
        scanned = in_phase(
            scanned, self._call.phase or ("training" if self._not_splittable == WHY_NOT else None)
        )
        failure = scanned.first_cause or failure
        clear(error, is_raised=error is self._first_error)
        release_after(failure, self._call, size)
        model = self._model(failure)
        from oomguard.diagnosis import default_rules

        diagnosis = self._ledger.diagnose(
            scanned,
            default_rules(),
            # Sizes that ran may be planned again, so only the failed size counts.
            failed_with={**self._ledger.settings, "batch_size": model.rows},
            given=facts_of(self._call, model),
            memory_model=model,
        )
        incident = diagnosis.first_cause or failure
        self._base_bytes = model.base_bytes or 0
        self._room_bytes = model.room_bytes(incident)
        self._incident = incident
        self._owner.incident(diagnosis)
        return incident

    def _report_split(self, error: BaseException) -> None:
        """Log at once that the call is split, because sizing takes a moment."""
        if self._not_splittable is not None or self._rows < 2 or "memory" not in str(error):
            return
        kind = type(self._call).__name__, id(self._call.model)
        logger = get_logger()
        if kind in self._owner.reported:
            log = logger.info
        else:
            log = logger.warning
        self._owner.reported.add(kind)
        log("out of memory: trying a few of the rows, then as many as fit", rows=self._rows)

    def _model(self, failure: Incident) -> CallModel:
        """Return the memory model of the failed call, with its possible variants."""
        if self._not_splittable is not None:
            rows = self._rows
        else:
            rows = min(self._size, self._rows - self._next_row)
        base = torch_memory.live_bytes(self._call.model)
        return CallModel(
            rows,
            base,
            seen_row_bytes=row_bytes_at_failure(failure, base, rows),
            estimated_row_bytes=self._call.estimated_row_bytes,
            is_cached=torch_memory.is_cached(),
            not_splittable=self._not_splittable,
            others_ran=self._next_row > 0,
            attempts_left=self._owner.policy.max_attempts - 1 - len(self._ledger.attempts),
            variants=self._changed.variants(),
        )

    def _apply(self, patch: Patch) -> None:
        self._owner.patched(patch)
        if patch.setting == "batch_size":
            assert isinstance(patch.new, int)  # noqa: S101 - a number of rows
            self._size = patch.new
        elif patch.new is not None:
            self._changed.change(patch.setting, patch.new)
            # All rows must get the same change.
            if patch.effect > Effect.OUTPUT_PRESERVING:
                self._gathered = OutputCollector.of(self._changed.made)
                self._next_row = 0
        log_patch(patch, self._incident.kind if self._incident else None, self._next_row)

    @property
    def _call(self) -> WatchedCall:
        return self._changed.call

    def _joined(self) -> tuple[Any, BaseException | None]:
        """Return the call's result; if joining the rows fails, they stay in the exception."""
        is_whole = not self._gathered.done
        result: Any = self._whole
        error: BaseException | None = None
        if not is_whole:
            result, error = run_guarded(self._gathered.result_of, (self._call,), {})
        if error is not None:
            clear(error)
            self._why_not_joined = f"The results of the parts cannot be joined: {error}"
            if may_be_oom(error):
                self._why_not_joined = (
                    f"The rows fit in parts, but the results of all {self._rows} rows do not fit "
                    f"on the device together. {_FEWER_RESULTS}"
                )
            self._first_error = self._first_error or error
            return None, self._given_up()
        failed = self._first_error is not None
        forget(self._first_error)
        rows = self._measured.most_rows or self._rows
        row_bytes = self._measured.row_bytes or None
        self._owner.known.ran(
            self._call, rows, row_bytes, after_failure=failed, varied=self._changed.lasting
        )
        self._owner.ended(tuple(self._ledger.attempts) if failed else (), None)
        return result, None

    def _given_up(self) -> BaseException | None:
        """Return the first failure, with the diagnosis and the finished rows in it."""
        error = self._first_error
        partial = partial_of(self._gathered)
        self._owner.ended(tuple(self._ledger.attempts), partial)
        if error is None or self._incident is None:
            return error
        why_whole = self._not_splittable
        if why_whole is None and self._rows == 1:
            why_whole = getattr(self._call, "advice_for_one_row", None)
        annotate(
            error,
            self._incident,
            self._ledger.attempts,
            why_whole=why_whole,
            why_not_joined=self._why_not_joined,
        )
        let_go(error)
        return leave_in(error, partial, why_whole)


Outcome = tuple[Any, BaseException | None]


def read_or_none(
    read: ReadCall, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> WatchedCall | None:
    """Read a call; return None if that fails, because the call itself rejects such arguments."""
    with contextlib.suppress(Exception):
        return read(model, args, kwargs)
    return None


def may_split(call: WatchedCall | None) -> bool:
    """Return whether a call can be split into rows."""
    with contextlib.suppress(Exception):
        return call is not None and call.not_splittable is None
    return False


def in_parts(
    owner: GuardEvents,
    wrapped: Callable[..., Any],
    call: WatchedCall,
    failed: list[BaseException] | None = None,
    *,
    seconds: float | None = None,
    measured: Mapping[str, float] | None = None,
) -> Outcome:
    """Return the call's result and None, or None and the exception to raise.

    A bug in oomguard never replaces the outcome of the user's call. ``failed`` holds the exception
    of the whole call; None: it has not run.
    """
    if failed:
        owner.failing(failed[0])
    first, generators = (failed[0], None) if failed else (None, RngState.now())
    run, mistake = run_guarded(MicroBatchRun, (owner, wrapped, call), {})
    if mistake is None:
        try:
            outcome, mistake = run_guarded(
                run.run, (failed,), {"seconds": seconds, "measured": measured}
            )
        finally:
            concurrency.leave()
        if mistake is None:
            ended: Outcome = outcome
            return ended
    report_mistake(mistake, first)
    # If the call has run, its own failure is the outcome; otherwise it runs now as without a guard.
    if generators is None:
        return None, first
    owner.known.forget(call)
    generators.put_back()
    return run_guarded(wrapped, call.args, call.kwargs)
