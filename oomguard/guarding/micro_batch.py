"""One call run whole, then in parts: the first part is small and is the measurement.

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

from oomguard.core.facts import FactValue
from oomguard.core.incident import Effect, Incident, Patch, SettingInForce
from oomguard.core.log import get_logger, get_plain_logger
from oomguard.core.partial_results import Partial
from oomguard.core.settings import effect_of
from oomguard.engines.protocol import ReadCall, WatchedCall
from oomguard.engines.registry import held_results_bytes, move_results
from oomguard.guarding import concurrency
from oomguard.guarding.collate import Gathered
from oomguard.guarding.failure import (
    add_note,
    annotate,
    clear,
    facts_of,
    forget,
    frames_of,
    in_phase,
    let_go,
    row_bytes_at_failure,
    run_guarded,
    scan_error,
)
from oomguard.guarding.observers import Owner
from oomguard.guarding.training import WHY_NOT, GradientRecorded, refusing_gradients, trains
from oomguard.probe import torch_memory
from oomguard.remedy.call_variants import CACHE, CHUNK, VARIED, Variant
from oomguard.remedy.failed_call import BATCH_MARGIN_RATIO, CallModel
from oomguard.retry.ledger import Ledger
from oomguard.scan.exceptions import may_be_oom

# Where torch's generators stood when a call began, and whether a call may begin in parts: it may
# have to be run again, whole.

# What the user gives to a call that changes as it runs, and cannot be put back.
_FILLED: Final = (
    "cache",
    "past_key_values",
    "cache_params",
    "streamer",
    "prefix_allowed_tokens_fn",
)
_LISTS: Final = ("logits_processor", "stopping_criteria")


@dataclass(frozen=True, slots=True)
class Generators:
    """Where torch's generators stood, by the kind of device; empty where torch is not loaded."""

    states: Mapping[str, Any]

    @classmethod
    def now(cls) -> Generators:
        """Note it for the CPU, and for CUDA devices where they are in use."""
        torch = sys.modules.get("torch")
        if torch is None:
            return cls({})
        states: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
        return cls(states)

    def put_back(self) -> None:
        """Put the generators back to where they stood."""
        torch = sys.modules.get("torch")
        if torch is None or not self.states:
            return
        torch.set_rng_state(self.states["cpu"])
        if "cuda" in self.states:
            torch.cuda.set_rng_state_all(self.states["cuda"])


def may_begin_in_parts(arguments: Mapping[str, Any], puts_back: Collection[str] = ()) -> bool:
    """Return whether a call may be run whole after parts of it ran: nothing of the user's in it may
    have changed by then.

    ``puts_back`` are those of its arguments that the call itself puts back.
    """
    if any(arguments.get(name) is not None for name in _FILLED if name not in puts_back):
        return False
    own = [entry for name in _LISTS for entry in _entries(arguments.get(name))]
    return all(type(entry).__module__.partition(".")[0] == "transformers" for entry in own)


def _entries(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if value is None:
        return []
    return [value]


# The rows of a call that were done when it was given up: left in its exception.


def partial_of(gathered: Gathered) -> Partial | None:
    """Return the rows of a call that are done, put together; None before the first, or if they
    cannot be.
    """
    if not gathered.done:
        return None
    finished, error = run_guarded(gathered.finished, (), {})
    if error is None:
        return Partial(gathered.rows, gathered.done, finished)
    return None


def leave_in(error: BaseException, partial: Partial | None, why_whole: str | None) -> BaseException:
    """Return an explained exception with why its call was not run in parts, and the rows that are
    done.
    """
    if why_whole is not None and why_whole not in "".join(getattr(error, "__notes__", ())):
        add_note(error, f"oomguard: not run in parts: {why_whole}")
    if partial is not None:
        keep_in(error, partial)
        done = f"{partial.done} of {partial.rows} rows are done"
        add_note(error, f"oomguard: {done}: `partial` of this exception holds them")
    return error


def keep_in(error: BaseException, partial: Partial) -> None:
    """Put the finished rows into an exception as ``partial``, unless it has an attribute of that
    name or takes none.
    """
    if not hasattr(error, "partial"):
        with contextlib.suppress(AttributeError, TypeError):
            error.partial = partial  # type: ignore[attr-defined]


# What to tell of our own mistake that ends a run in parts.


def tell_of_mistake(mistake: BaseException, failure: BaseException | None) -> None:
    """Log our own mistake, and note it in the call's failure, if it has one."""
    get_plain_logger().error("the call could not be split", exc_info=mistake)
    if failure is not None:
        why = f"a mistake in oomguard: {type(mistake).__name__}: {mistake}"
        add_note(failure, f"oomguard: not run in parts: {why}")


# What lies on the device beside a call that ran out of memory: results of its own finished parts
# and of calls before it, other calls.

# Smaller results than this share of what was asked for make no room for it on the host.
_PARKED_SHARE: Final = 16


def make_room(error: BaseException, gathered: Gathered, call: WatchedCall) -> bool:
    """Move results to the host where a call failed for memory beside them, else let other calls
    end; return whether it may run again.
    """
    return _move_results(error, gathered) or (
        call.not_splittable is None and concurrency.have_ended(error, call.model)
    )


def _move_results(error: BaseException, gathered: Gathered) -> bool:
    own = gathered.device_bytes
    earlier = held_results_bytes()
    if (own or earlier) and may_be_oom(error):
        failure = scan_error(error).first_cause
    else:
        failure = None
    if failure is None or (own + earlier) * _PARKED_SHARE < (failure.number("tried_bytes") or 0):
        return False
    clear(error)
    failed = [
        run_guarded(move, (), {})[1]
        for move, size in ((gathered.park, own), (move_results, earlier))
        if size
    ]
    torch_memory.release()
    if earlier and not any(failed):
        get_logger().warning("results of earlier batches wait on the host", size_bytes=earlier)
    return not any(failed)


# Some rows of a call run by themselves: where there is no room to cut them out, they failed as
# where there is none to run them.


def run_rows(
    wrapped: Callable[..., Any], call: WatchedCall, start: int, stop: int
) -> tuple[Any, BaseException | None]:
    """Return what rows ``start`` to ``stop`` give and None, or None and the exception that their
    call raised.

    Raises:
        Exception: a mistake of ours in cutting them out.
    """
    given, error = run_guarded(call.part, (start, stop), {})
    if error is None:
        args, kwargs = given
        return run_guarded(wrapped, args, kwargs)
    if not may_be_oom(error):
        raise error
    return None, error


# What the parts of one call took, and how many rows the next part may have.

# Rows to come may be heavier than those that ran, so a part is at most so many times the largest
# before it.
_MOST_GROWTH: Final = 8
# One part says little of the rows to come: without padding, say, it needs no mask.
_ONE_PART_MARGIN_RATIO: Final = 0.06
# Of rows that did not fit although others said that they do: by how much they missed is not known.
_BELOW_FAILED_RATIO: Final = 0.9


class RowMeasurements:
    """The parts that ran.

    Attributes:
        most_rows: the most rows that ran together.
        row_bytes: the most that one row of them took; 0 if that is not known.
    """

    def __init__(self) -> None:
        self.most_rows = 0
        self.row_bytes = 0.0
        self._taken_bytes: dict[int, int] = {}
        self._limit_rows: int | None = None

    def add(self, rows: int, before_bytes: int | None, peak_bytes: int | None) -> None:
        """Note rows that ran, by the bytes alive before them and at their peak."""
        self.most_rows = max(self.most_rows, rows)
        if before_bytes is None or peak_bytes is None:
            return
        taken = peak_bytes - before_bytes
        self.row_bytes = max(self.row_bytes, taken / rows)
        self._taken_bytes[rows] = max(taken, self._taken_bytes.get(rows, 0))

    def failed(self, rows: int) -> None:
        """Note rows that ran out of memory together: what was measured before them is
        not enough.
        """
        limit = max(1, int(rows * _BELOW_FAILED_RATIO))
        if self._limit_rows is None:
            self._limit_rows = limit
        else:
            self._limit_rows = min(self._limit_rows, limit)
        self._taken_bytes.clear()
        self.most_rows = 0
        self.row_bytes = 0.0

    def rows_within(self, room_bytes: float) -> int | None:
        """Return how many rows fit in ``room_bytes``; None before any part was measured.

        On the line through the two largest parts; after only one in proportion, with a margin. At
        most eight times the largest part, and never as many as have failed.
        """
        if not self._taken_bytes:
            return None
        (rows, taken), *smaller = sorted(self._taken_bytes.items(), reverse=True)
        slope = max(size / number for number, size in self._taken_bytes.items())
        if not smaller:
            slope *= 1 + _ONE_PART_MARGIN_RATIO
        if smaller and smaller[0][1] < taken:
            slope = (taken - smaller[0][1]) / (rows - smaller[0][0])
        found = rows + int((room_bytes - taken) // max(1.0, slope))
        if self._limit_rows is None:
            limit = found
        else:
            limit = self._limit_rows
        return max(1, min(found, _MOST_GROWTH * rows, limit))


# A call as it runs now: as it was made, or with some of its settings changed.

_MESSAGES: Final[Mapping[str, tuple[str, str]]] = {
    "attn_implementation": ("running attention without its scores", "attention"),
    CHUNK: ("processing the prompt in chunks", "tokens"),
    CACHE: ("keeping the cache another way", "cache"),
    "max_new_tokens": ("cutting the answers", "tokens"),
    "truncate_prompt_tokens": ("cutting the prompts", "tokens"),
}


class ChangedCall:
    """A call and what of it is changed.

    Attributes:
        made: the call as it was made.
        call: the call as it runs.
        settings: what differs.
    """

    def __init__(self, made: WatchedCall) -> None:
        self.made = self.call = made
        self.settings: dict[str, FactValue] = {}
        self._failed_in: frozenset[str] | None = None
        self._refused: dict[str, str] = {}

    def failed(self, error: BaseException) -> None:
        """Note the functions that a failure went through: what no failure of the call left may have
        run already.
        """
        functions = frozenset(frame.f_code.co_name for frame in frames_of(error))
        if self._failed_in is None:
            self._failed_in = functions
        else:
            self._failed_in = self._failed_in & functions

    def change(self, setting: str, value: FactValue) -> None:
        """Change one more setting, if that can be done."""
        changed = self._with(setting, value)
        if isinstance(changed, str):
            self._refused[setting] = changed
        else:
            self.call, self.settings[setting] = changed, value

    def take_back(self, why: str) -> dict[str, FactValue]:
        """Go back to the call as it was made, and return what was changed."""
        self._refused.update(dict.fromkeys(self.settings, f"with it: {why}"))
        changed = self.settings
        self.call = self.made
        self.settings = {}
        return changed

    @property
    def lasting(self) -> dict[str, FactValue]:
        """What later calls may begin with: what changes no output."""
        return {
            name: v
            for name, v in self.settings.items()
            if effect_of(name, None, v) is Effect.OUTPUT_PRESERVING
        }

    def variants(self) -> dict[str, Variant]:
        """Return what may be done another way; empty if the call has no prompt of known length."""
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
    """Log what changes, and after how many rows."""
    if patch.setting in _MESSAGES:
        message, name = _MESSAGES[patch.setting]
        get_logger().warning(message, **{name: patch.new}, kind=kind, done=done)
    else:
        get_logger().info(
            "splitting the batch", rows=f"{patch.old} -> {patch.new}", kind=kind, done=done
        )


# Results that would take more than this part of the room wait on the host.
_RESULTS_SHARE: Final = 4
_FEWER_RESULTS: Final = (
    "Put the call, and what you compute from it, into one function under "
    "@oomguard.guard(batch=NAME) and @torch.inference_mode(). NAME is the argument with one entry "
    "a row. Return one small result a row, such as a loss for each row"
)


class MicroBatchRun:
    """One call under the guard: run whole, then in parts of as many rows as fit; finished rows are
    kept.

    Args:
        owner: the guard in force, which is told of each attempt, incident and patch.
        wrapped: the engine's own function, or the user's.
        call: one call of it, as it was made.
    """

    def __init__(self, owner: Owner, wrapped: Callable[..., Any], call: WatchedCall) -> None:
        self._owner = owner
        self._wrapped = wrapped
        self._changed = ChangedCall(call)
        self._rows = self._size = self._begun = call.rows
        self._whole: Any = None
        self._gathered = Gathered.of(self._changed.made)
        self._next_row = self._base_bytes = 0
        self._ledger = Ledger(owner.policy, {"batch_size": call.rows})
        self._not_splittable: str | None = call.not_splittable
        self._measured = RowMeasurements()
        self._generators = Generators({})
        unknown: float | None = None
        self._room_bytes = self._peak_bytes = self._seconds = unknown
        self._first_error: BaseException | None = None
        self._part_error: str | None = None
        self._incident: Incident | None = None

    def run(
        self,
        failed: list[BaseException] | None = None,
        *,
        seconds: float | None = None,
        measured: Mapping[str, float] | None = None,
    ) -> tuple[Any, BaseException | None]:
        """Return the call's result and None, or None and the exception to raise.

        ``failed`` holds the exception of the whole call, where it has been run already, and is
        emptied: no frame may keep it.
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
        except (
            BaseException
        ) as stop:  # or our own mistake: what is done can be reached all the same
            partial = partial_of(self._gathered)
            self._owner.ended((), partial)
            if partial is not None:
                keep_in(stop, partial)
            if self._first_error is None or not isinstance(stop, Exception):
                raise
            tell_of_mistake(stop, self._first_error)
            return None, self._given_up()
        finally:
            self._first_error = (
                None  # its frames' callers hold this run: neither would go before a collection
            )

    def _begin(self) -> None:
        """Begin with the rows that earlier calls ran with, and with what is free for them now."""
        self._base_bytes = torch_memory.live_bytes(self._call.model) or 0
        free = torch_memory.free_bytes()
        if not self._owner.known or not may_begin_in_parts(self._call.kwargs, self._call.puts_back):
            return
        self._generators = Generators.now()
        self._size = self._begun = self._owner.known.begin(self._call, free)
        self._ledger.settings["batch_size"] = self._size
        if self._size < self._rows:
            self._gathered.park()  # what is known to fit was alone with the rows
        for name, value in self._owner.known.varied(self._call).items():
            self._changed.change(name, value)
        if free is None:
            self._room_bytes = None
        else:
            self._room_bytes = free * (1 - BATCH_MARGIN_RATIO)

    def _attempt(self) -> bool:
        """Run the rows that are left; return False where one part failed."""
        if self._ledger.attempts:
            self._peak_bytes = self._seconds = None
        self._ledger.settings.update(self._changed.settings)
        if self._size >= self._rows:
            failed = self._run_whole()
        else:
            failed = self._run_parts()
        # Measured parts made room for larger ones: the last size is the one that holds.
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
        """Run the call as the user made it, unless it has been run, or another way, and keep its
        result; ``again``: it has begun.
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
                self._gathered = Gathered(self._rows)
                if self._owner.known:
                    self._measured.add(self._rows, self._base_bytes, self._peak_bytes)
                return None
            around = self._call.around(0, self._rows)  # what the failed call drew is drawn again
        return error

    def _run_changed(self) -> BaseException | None:
        """Run all rows another way; return the first failure where that shows that it cannot be
        done.
        """
        with torch_memory.MemoryPeak() as measured, self._call.around(0, self._rows):
            self._whole, error = run_guarded(self._wrapped, self._call.args, self._call.kwargs)
        self._peak_bytes = measured.bytes
        if error is not None and may_be_oom(error) and scan_error(error).first_cause is not None:
            return error
        why = (
            f"{type(error).__name__}: {error}"
            if error is not None
            else self._call.problem(self._whole, self._rows)
        )
        if why is None:
            self._whole = self._call.completed(self._whole, 0, self._rows)
            self._gathered = Gathered(self._rows)  # its rows stand in the whole result too
            return None
        self._ledger.forget(self._changed.take_back(why))
        self._generators.put_back()
        return self._run_whole(again=True)

    def _run_parts(self) -> BaseException | None:
        while self._next_row < self._rows:
            stop = min(self._rows, self._next_row + self._size)
            # blocks of parts of another size hold no whole tensor of this one's
            torch_memory.empty_cache()
            rows = stop - self._next_row
            before = torch_memory.live_bytes(self._call.model)
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
                self._gathered, self._next_row = Gathered(self._rows), 0  # nothing done is of use
            elif error is None:
                problem, error = run_guarded(self._gathered.take, (self._call, part, rows), {})
            del part
            if problem is not None:
                return self._as_it_was_made(problem)
            if error is not None and make_room(error, self._gathered, self._call):
                continue
            if error is not None:
                return self._failed_in_part(error, stop)
            self._measured.add(rows, before, peak)
            self._next_row = stop
            self._resize(before)
        return None

    def _failed_in_part(self, error: BaseException, stop: int) -> BaseException | None:
        """Return what a part's failure is judged by: itself, or the call as it was made where the
        split may have caused it.
        """
        if isinstance(error, GradientRecorded):
            forget(error)
            return self._as_it_was_made(str(error))
        if may_be_oom(error) and scan_error(error).first_cause is not None:
            self._measured.failed(stop - self._next_row)
            return error
        if self._first_error is None and stop - self._next_row >= self._begun:
            return error  # earlier calls ran in parts of this size
        self._part_error = type(error).__name__
        forget(error)
        return self._as_it_was_made(
            f"rows {self._next_row} to {stop} by themselves raised {self._part_error}: {error}"
        )

    def _as_it_was_made(self, why_not: str) -> BaseException | None:
        """Return the failure of the whole call, whose parts cannot stand for it; run it where it
        has not been run.
        """
        self._not_splittable = why_not
        self._size = self._rows
        self._ledger.forget(self._changed.take_back(why_not))
        if self._first_error is None:
            self._owner.known.forget(self._call)
            self._gathered = Gathered(self._rows)
            self._next_row = 0
            self._part_error = None
            self._generators.put_back()
        return self._run_whole(again=True)

    def _resize(self, before_bytes: int | None) -> None:
        """Set the rows of the next part from what the parts so far took; results that would fill
        the room wait on the host.
        """
        if before_bytes is None or self._room_bytes is None:
            return
        if self._gathered.device_bytes * _RESULTS_SHARE > self._room_bytes:
            self._gathered.park()
        held = (torch_memory.live_bytes(self._call.model) or before_bytes) - self._base_bytes
        rows = self._measured.rows_within(self._room_bytes - held)
        if rows is not None:
            self._size = min(self._rows, rows)

    def _explain(self, error: BaseException) -> Incident | None:
        """Diagnose a failure and plan for it; None where it is no memory failure. The first one is
        what is raised in the end.
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
            self._first_error, self._incident = (
                error,
                None,
            )  # no memory failure: not ours to explain or to replace
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
        torch_memory.release()
        model = self._model(failure)
        from oomguard.diagnosis.diagnose import default_rules

        diagnosis = self._ledger.diagnose(
            scanned,
            default_rules(),
            failed_with={
                **self._ledger.settings,
                "batch_size": model.rows,
            },  # one that ran may be planned again
            given=facts_of(self._call, model),
            behind=model,
        )
        incident = diagnosis.first_cause or failure
        self._base_bytes = model.base_bytes or 0
        self._room_bytes = model.room_bytes(incident)
        self._incident = incident
        self._owner.incident(diagnosis)
        return incident

    def _report_split(self, error: BaseException) -> None:
        """Log at once that the call goes on in parts, once for each kind of call: finding their
        size takes a moment.
        """
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
        """Return the call as its model: what its rows held when they failed, and what of it may be
        done another way.
        """
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
            attempts_left=self._owner.policy.max_relaunches - len(self._ledger.attempts),
            variants=self._changed.variants(),
        )

    def _apply(self, patch: Patch) -> None:
        self._owner.patched(patch)
        if patch.setting == "batch_size":
            assert isinstance(patch.new, int)  # noqa: S101 - a number of rows
            self._size = patch.new
        elif patch.new is not None:
            self._changed.change(patch.setting, patch.new)
            if patch.effect > Effect.OUTPUT_PRESERVING:  # the same for all rows
                self._gathered = Gathered.of(self._changed.made)
                self._next_row = 0
        log_patch(patch, self._incident.kind if self._incident else None, self._next_row)

    @property
    def _call(self) -> WatchedCall:
        return self._changed.call

    def _joined(self) -> tuple[Any, BaseException | None]:
        """Return the call's result, whole or put together; where that runs out of memory, the rows
        stand in the exception.
        """
        is_whole = not self._gathered.done
        result, error = (
            (self._whole, None)
            if is_whole
            else run_guarded(self._gathered.result_of, (self._call,), {})
        )
        if error is not None:
            clear(error)
            why = f"its rows cannot be put together: {error}"
            if may_be_oom(error):
                why = (
                    f"the results of all {self._rows} rows do not fit on the device together. "
                    f"{_FEWER_RESULTS}"
                )
            self._not_splittable = self._not_splittable or why
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
        annotate(error, self._incident, self._ledger.attempts, why_whole=why_whole)
        let_go(error)
        return leave_in(error, partial, why_whole)


# A call handed over to be run in parts: our own mistake there never takes the place of what the
# user's call does.

Outcome = tuple[Any, BaseException | None]


def read_or_none(
    read: ReadCall, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> WatchedCall | None:
    """Read a call; return None where that fails, as of arguments that the call itself refuses."""
    with contextlib.suppress(Exception):
        return read(model, args, kwargs)
    return None


def may_split(call: WatchedCall | None) -> bool:
    """Return whether a call's rows can be run apart."""
    with contextlib.suppress(Exception):
        return call is not None and call.not_splittable is None
    return False


def in_parts(
    owner: Owner,
    wrapped: Callable[..., Any],
    call: WatchedCall,
    failed: list[BaseException] | None = None,
    *,
    seconds: float | None = None,
    measured: Mapping[str, float] | None = None,
) -> Outcome:
    """Return the call's result and None, or None and the exception to raise: its own, also where
    our own mistake ends the run.

    ``failed`` holds the exception of the whole call, where it has been run already.
    """
    if failed:
        owner.failing(failed[0])
    first, generators = (failed[0], None) if failed else (None, Generators.now())
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
    tell_of_mistake(mistake, first)
    if generators is None:
        return None, first
    owner.known.forget(call)
    generators.put_back()
    return run_guarded(wrapped, call.args, call.kwargs)
