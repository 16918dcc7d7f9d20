"""The guard: a decorator and a context manager that watch engine calls and remedy them one by one.

A context variable holds the guard in force, so threads and tasks outside it see nothing, and guards nest: the
innermost one's policy rules. What cannot be remedied is raised again as it was, with the diagnosis in its notes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Literal, TypeVar, overload

from oomguard.diagnosing import assess_all, default_rules
from oomguard.engines import transformers as hf
from oomguard.engines.rows import RowsCall
from oomguard.facts import Fact, FactValue
from oomguard.incident import Attempt, Diagnosis, Effect, Incident, Patch, SettingInForce
from oomguard.observe import torch_memory
from oomguard.observe.exceptions import exception_lines, may_be_oom
from oomguard.observe.scan import scan
from oomguard.remedy.planner import next_patch
from oomguard.remedy.policy import Policy
from oomguard.remedy.settings import setting
from oomguard.report.note import note

F = TypeVar("F", bound=Callable[..., Any])
EffectName = Literal["output-preserving", "reduces-capacity", "changes-outputs"]
DEFAULT_MAX_ATTEMPTS: Final = 8

_in_force: ContextVar[Guard | None] = ContextVar("oomguard_guard", default=None)
_inside_call: ContextVar[bool] = ContextVar("oomguard_inside_call", default=False)


class Guard:
    """One guard; make it with ``oomguard.guard``. ``attempts`` and ``diagnosis`` say what happened under it."""

    def __init__(
        self,
        policy: Policy,
        *,
        batch: str | None = None,
        on_incident: Callable[[Incident], object] | None = None,
        on_patch: Callable[[Patch], object] | None = None,
    ) -> None:
        self.policy = policy
        self.batch = batch
        self.attempts: tuple[Attempt, ...] = ()
        self.diagnosis: Diagnosis | None = None
        self._on_incident, self._on_patch = on_incident, on_patch
        self._tokens: list[Any] = []

    def __enter__(self) -> Guard:
        if not _disabled():
            hf.watch(_watched_generate)
        self._tokens.append(_in_force.set(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _in_force.reset(self._tokens.pop())
        if error is not None and not _disabled():
            self._explain(error)

    async def __aenter__(self) -> Guard:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Guard a function: sync, async, generator or async generator, also a method."""
        return _decorate(self, function)

    def _explain(self, error: BaseException) -> None:
        """Add the diagnosis to an exception that leaves the guard, once, and only where it is a memory failure."""
        if getattr(error, "__oomguard__", False) or not may_be_oom(error):
            return
        diagnosis = diagnose_error(error, self.policy)
        if diagnosis.first_cause is not None:
            self.diagnosis = diagnosis
            _annotate(error, diagnosis.first_cause)

    def _fresh(self) -> Guard:
        """A guard of the same policy for one call of a decorated function."""
        return Guard(self.policy, batch=self.batch, on_incident=self._on_incident, on_patch=self._on_patch)

    def record(self, attempt: Attempt) -> None:
        """Add an attempt."""
        self.attempts = (*self.attempts, attempt)

    def incident(self, diagnosis: Diagnosis) -> None:
        """Note a diagnosis, and tell the callback."""
        self.diagnosis = diagnosis
        if self._on_incident is not None and diagnosis.first_cause is not None:
            self._on_incident(diagnosis.first_cause)

    def patched(self, patch: Patch) -> None:
        """Tell the callback of a patch that is applied now."""
        if self._on_patch is not None:
            self._on_patch(patch)


@overload
def guard(function: F, /) -> F: ...
@overload
def guard(
    function: None = None,
    /,
    *,
    allow: EffectName | None = None,
    floors: Mapping[str, FactValue] | None = None,
    pin: Collection[str] = (),
    batch: str | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    on_incident: Callable[[Incident], object] | None = None,
    on_patch: Callable[[Patch], object] | None = None,
) -> Guard: ...
def guard(
    function: Callable[..., Any] | None = None,
    /,
    *,
    allow: EffectName | None = None,
    floors: Mapping[str, FactValue] | None = None,
    pin: Collection[str] = (),
    batch: str | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    on_incident: Callable[[Incident], object] | None = None,
    on_patch: Callable[[Patch], object] | None = None,
) -> Any:
    """Guard a function (``@guard``, ``@guard(...)``) or a block (``with guard() as g``) against running out of memory.

    Engine calls inside (``generate`` of transformers) are diagnosed when they fail for memory, changed by the least
    that fits, and run again; completed rows are kept and the order of results never changes.

    Args:
        allow: highest effect a patch may have; None: output-preserving, and reduces-capacity on what you left alone.
        floors: never go below these values, by setting.
        pin: settings that are never touched.
        batch: the argument of a decorated function to split by rows, a list or tensor; its result must be one too.
        max_attempts: runs of one call, the first included.
        on_incident: called with each incident, diagnosed and planned for.
        on_patch: called with each patch before it is applied.

    Raises SettingError for an unknown setting. What the guarded code raises is raised unchanged, with the diagnosis
    added to its notes where it is a memory failure.
    """
    if allow is not None and allow not in {str(effect) for effect in Effect}:
        from oomguard.errors import SettingError

        raise SettingError(f"allow={allow!r}", hint=f"one of {', '.join(str(effect) for effect in Effect)}")
    policy = Policy(
        Effect.parse(allow) if allow else None,
        frozenset(setting(name).name for name in pin),
        {setting(name).name: value for name, value in (floors or {}).items()},
        max_relaunches=max_attempts - 1,
    )
    made = Guard(policy, batch=batch, on_incident=on_incident, on_patch=on_patch)
    return made if function is None else made(function)


def diagnose_error(error: BaseException, policy: Policy, tried: Collection[tuple[str, FactValue]] = (), given: Mapping[str, Fact] | None = None, settings: Mapping[str, SettingInForce] | None = None) -> Diagnosis:
    """The diagnosis of an exception, with the facts that a guarded call knows of itself."""
    scanned = scan(exception_lines(error), default_rules(), type(error).__name__, given=settings)
    return assess_all(scanned, default_rules(), policy, tried, given=given)


def clear(error: BaseException) -> None:
    """Drop the locals of the frames in an exception's traceback and its chain: they hold the failed call's tensors."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def _annotate(error: BaseException, incident: Incident, attempts: Sequence[Attempt] = ()) -> None:
    with contextlib.suppress(AttributeError, TypeError):
        error.add_note(note(incident, attempts))
        error.__oomguard__ = True  # type: ignore[attr-defined]


def _disabled() -> bool:
    return bool(os.environ.get("OOMGUARD_DISABLE"))


def _watched_generate(wrapped: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What every ``generate`` goes through: itself, unless a guard is in force and no watched call is around it."""
    current = _in_force.get()
    if current is None or _inside_call.get() or _disabled():
        return wrapped(*args, **kwargs)
    result, error = _run_split(current, wrapped, hf.GenerateCall.of(model, args, kwargs))
    if error is not None:
        raise error
    return result


def _run_split(owner: Guard, function: Callable[..., Any], call: Any) -> tuple[Any, BaseException | None]:
    """The result or the exception to raise: the caller raises it, so that as few of our frames as can be stand above."""
    token = _inside_call.set(True)
    try:
        return _SplitRun(owner, function, call).run()
    finally:
        _inside_call.reset(token)


class _SplitRun:
    """One call under the guard: run whole, then in parts of as many rows as fit; finished rows are kept."""

    def __init__(self, owner: Guard, wrapped: Callable[..., Any], call: Any) -> None:
        self._owner, self._wrapped, self._call = owner, wrapped, call
        self._done: list[Any] = []
        self._next_row = 0
        self._size = call.rows
        self._pending: tuple[Patch, ...] = ()
        self._tried: set[tuple[str, FactValue]] = set()
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
        if retrying(self._attempt):
            return self._call.merge(self._done), None
        error, self._first_error = self._first_error, None
        if error is not None and self._incident is not None:
            _annotate(error, self._incident, self._owner.attempts)
        return None, error

    def _attempt(self) -> bool:
        """Run the rows that are left; False where one part failed."""
        number, started = len(self._owner.attempts) + 1, time.monotonic()
        patches, self._pending = self._pending, ()
        settings: dict[str, FactValue] = {"batch_size": self._size}
        torch_memory.reset_peak()
        failed = self._run_parts()
        peak = torch_memory.peak_bytes()
        measured: dict[str, float] = {} if peak is None else {"peak_bytes": peak}
        seconds = time.monotonic() - started
        if failed is None:
            self._owner.record(Attempt(number, settings, patches, seconds=seconds, measured=measured))
            return True
        incident = self._remedy(failed)
        self._owner.record(Attempt(number, settings, patches, incident, error=type(failed).__name__, seconds=seconds, measured=measured))
        return False

    def _run_parts(self) -> BaseException | None:
        while self._next_row < self._call.rows:
            stop = min(self._call.rows, self._next_row + self._size)
            args, kwargs = self._call.part(self._next_row, stop) if stop - self._next_row < self._call.rows else (self._call.args, self._call.kwargs)
            try:
                part = self._wrapped(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - judged below, and raised again unless it is remedied
                # The traceback starts at the engine's own frames: ours say nothing to the user.
                trace = error.__traceback__
                error.__traceback__ = trace.tb_next if trace is not None else None
                return error
            self._done.append(part)
            self._next_row = stop
        return None

    def _remedy(self, error: BaseException) -> Incident | None:
        """Diagnose a failure and choose the next size; what is to be raised in the end is the first failure."""
        self._first_error = self._first_error or error
        if not may_be_oom(error):
            self._first_error, self._incident = error, None
            return None
        clear(error)
        torch_memory.release()
        given = self._facts(error)
        in_force = {"batch_size": SettingInForce("batch_size", self._size, None, "given")}
        diagnosis = diagnose_error(error, self._owner.policy, self._tried, given, in_force)
        incident = diagnosis.first_cause
        self._incident = incident
        if incident is None:
            self._first_error = error
            return None
        if self._call.not_splittable is not None:
            blocked = tuple(replace(p, blocked_by=self._call.not_splittable) if p.setting == "batch_size" else p for p in incident.plan)
            incident = replace(incident, plan=blocked)
            diagnosis = replace(diagnosis, incidents=(incident, *diagnosis.incidents[1:]))
            self._incident = incident
        self._owner.incident(diagnosis)
        patch = next_patch(incident)
        if patch is not None and patch.setting == "batch_size" and isinstance(patch.new, int):
            self._apply(patch, incident)
        return incident

    def _apply(self, patch: Patch, incident: Incident) -> None:
        from oomguard.log import get_logger

        self._owner.patched(patch)
        assert isinstance(patch.new, int)  # noqa: S101 - the caller looked
        self._size, self._pending = patch.new, (patch,)
        self._tried.add((patch.setting, patch.new))
        get_logger().info("splitting the batch", rows=f"{patch.old} -> {patch.new}", kind=incident.kind, done=self._next_row)

    def _facts(self, error: BaseException) -> dict[str, Fact]:
        """What the call knows of itself, and the bytes of one row: by the model, at least what was live when it failed."""
        call, rows = self._call, min(self._size, self._call.rows - self._next_row)
        values: dict[str, FactValue | None] = {
            "batch_size": rows, "prompt_tokens": call.prompt_tokens, "max_new_tokens": call.max_new_tokens,
        }  # fmt: skip
        base = torch_memory.live_bytes(self._call.model)
        values["baseline_bytes"] = base
        values["row_bytes"], values["row_bytes_at_failure"] = row_bytes(error, base, rows, self._call.modelled_row_bytes())
        return {name: Fact(name, value, "measured") for name, value in values.items() if value is not None}


def row_bytes(error: BaseException, base: int | None, rows: int, modelled: int | None) -> tuple[int | None, int | None]:
    """Bytes that one row needs and those it held when the call failed, from the live bytes in the message.

    Without a model the call's end is unknown: it had not finished, so its need is taken as twice what was live.
    """
    scanned = scan(exception_lines(error), default_rules()).first_cause
    tried = scanned.number("tried_bytes") if scanned else None
    live = (scanned.number("allocated_bytes") or scanned.number("process_in_use_bytes")) if scanned else None
    if base is None or tried is None or live is None:
        return modelled, None
    at_failure = max(1, round((live + tried - base) / rows))
    return (max(at_failure, modelled) if modelled is not None else 2 * at_failure), at_failure


def _decorate(made: Guard, function: F) -> F:
    if made.batch is not None and made.batch not in inspect.signature(function).parameters:
        from oomguard.errors import SettingError

        raise SettingError(f"{function.__qualname__} has no argument {made.batch!r} to split")
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def async_generator(*args: Any, **kwargs: Any) -> Any:
            items = function(*args, **kwargs)
            current = made._fresh()
            try:
                while True:
                    with current:
                        try:
                            item = await anext(items)
                        except StopAsyncIteration:
                            return
                    yield item
            finally:
                await items.aclose()

        return async_generator  # type: ignore[return-value]
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            with made._fresh():
                return await function(*args, **kwargs)

        return coroutine  # type: ignore[return-value]
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Iterator[Any]:
            current, items = made._fresh(), function(*args, **kwargs)
            try:
                while True:
                    with current:
                        try:
                            item = next(items)
                        except StopIteration as end:
                            return end.value
                    yield item
            finally:
                items.close()

        return generator  # type: ignore[return-value]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with made._fresh() as current:
            if current.batch is None or _disabled():
                return function(*args, **kwargs)
            result, error = _run_split(current, function, RowsCall.of(function, current.batch, args, kwargs))
            if error is not None:
                raise error
            return result

    return call  # type: ignore[return-value]
