"""The guard: a decorator and a context manager that watch engine calls and remedy them one by one.

A context variable holds the guard in force, so threads and tasks outside it see nothing, and guards nest: the
innermost one's policy rules. What cannot be remedied is raised again as it was, with the diagnosis in its notes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, ParamSpec, TypeVar, cast, overload

from oomguard.errors import SettingError
from oomguard.facts import FactValue
from oomguard.guarding import sent
from oomguard.guarding.decorating import decorate
from oomguard.guarding.guarded_function import GuardedFunction
from oomguard.guarding.known_sizes import KnownSizes
from oomguard.guarding.observing import attempted
from oomguard.guarding.snapshot import snapshot_path, take_at
from oomguard.guarding.watching import entered, in_force, watch, watching
from oomguard.incident import Attempt, Diagnosis, Incident, Patch
from oomguard.log import get_plain_logger
from oomguard.observe.exceptions import may_be_oom
from oomguard.partial import Partial
from oomguard.remedy.policy import Policy, make_policy
from oomguard.snapshots.taking import Recording
from oomguard.switch import disabled
from oomguard.telemetry import guarded

P = ParamSpec("P")
R = TypeVar("R")
EffectName = Literal["output-preserving", "reduces-capacity", "changes-outputs"]
DEFAULT_MAX_ATTEMPTS: Final = 8
# A guard around a loop of days keeps no more than these.
MAX_ATTEMPTS_KEPT: Final = 1000


class Guard:
    """One guard; make it with ``oomguard.guard``.

    Attributes:
        policy: what it permits.
        batch: the arguments along which a decorated function is split; empty: it is not.
        restart: whether an engine that dies at work of anything but memory is made again.
        start_within_s: the seconds in which an engine must have started; None: it may take any number.
        attempts: the last 1,000 attempts under ``with``, over all calls in it but those that succeeded at once, as they were
            made. A decorated function's are on the function: those of the last call that ran out of memory.
        diagnosis: the last failure; None: there was none. A decorated function's is on the function.
        recording: what takes a memory snapshot at the first failure; None: none is asked for.
        partial: the rows that are done of the last call under ``with``, where it was given up; None otherwise.
        known: the sizes that ran in earlier calls, with which later ones begin.
        reported: the kinds of calls of which a warning said that they go on in parts.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        batch: str | Collection[str] | None = None,
        restart: bool = False,
        start_within_s: float | None = None,
        snapshot: Path | None = None,
        on_incident: Callable[[Incident], object] | None = None,
        on_patch: Callable[[Patch], object] | None = None,
    ) -> None:
        self.policy, self.restart, self.start_within_s = policy, restart, start_within_s
        self.batch: tuple[str, ...] = (batch,) if isinstance(batch, str) else tuple(batch or ())
        self._attempts: deque[Attempt] = deque(maxlen=MAX_ATTEMPTS_KEPT)
        self.reported: set[tuple[str, int]] = set()
        self.diagnosis: Diagnosis | None = None
        self.partial: Partial | None = None
        self.known = KnownSizes()
        self.recording = None if snapshot is None else Recording(snapshot)
        self._on_incident, self._on_patch = on_incident, on_patch
        self._function: Any = None
        self._name = ""
        self._lock = threading.Lock()

    def __enter__(self) -> Guard:
        if not watching:
            watch()
        if self.recording is not None and not disabled():
            self.recording.begin()
        entered.set((*entered.get(), self))
        in_force.append(None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        in_force.pop()
        guards = list(entered.get())
        if self in guards:
            del guards[len(guards) - 1 - guards[::-1].index(self)]
            entered.set(tuple(guards))
        if error is not None:
            self.explain(error)
        if self.recording is not None and self.recording.is_on:
            self.recording.end()

    async def __aenter__(self) -> Guard:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> GuardedFunction[P, R]:
        """Guard a function: sync, async, generator or async generator, also a method."""
        return cast("GuardedFunction[P, R]", decorate(self, function))

    def explain(self, error: BaseException) -> None:
        """Add the diagnosis to an exception that leaves the guard, once, and only where it is a memory failure."""
        if not may_be_oom(error) or disabled():
            return
        if "__oomguard__" in vars(error):
            from oomguard.guarding.unwatched import note_if_taken_earlier

            note_if_taken_earlier(error)
            return
        self.failing(error)
        try:
            from oomguard.guarding.explained import explained  # a guard that sees no failure does not wait for it

            diagnosis = explained(
                error, self.policy, self.attempts if self._function is None else self._function.attempts
            )
        except Exception:
            logger = get_plain_logger()
            logger.exception("the diagnosis failed")
            return
        if diagnosis is not None:
            self._keep(diagnosis)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The attempts that are kept, in order."""
        return tuple(self._attempts)

    @property
    def snapshot(self) -> Path | None:
        """The file of the memory snapshot that was taken in this process; None: none was."""
        return None if self.recording is None else self.recording.taken

    def for_function(self, batch: tuple[str, ...] | None = None) -> Guard:
        """Return a guard of the same policy for all calls of one decorated function; ``batch`` None: split as this one says."""
        return Guard(
            self.policy,
            batch=self.batch if batch is None else batch,
            restart=self.restart,
            start_within_s=self.start_within_s,
            snapshot=None if self.recording is None else self.recording.path,
            on_incident=self._on_incident,
            on_patch=self._on_patch,
        )

    def begin_recording(self) -> None:
        """Record for a memory snapshot from a decorated function's first call on, where one is asked for."""
        if self.recording is not None and not self.recording.is_on and not disabled():
            self.recording.begin()

    def failing(self, error: BaseException) -> None:
        """Take the memory snapshot, where one is asked for."""
        take_at(error, self.recording)

    def __getstate__(self) -> dict[str, Any]:
        return sent.state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        sent.restore(self, state)

    def shows_on(self, function: Any) -> None:
        """Show on a decorated function what happened in its calls, as ``attempts`` and ``diagnosis``."""
        self._function, self._name = function, f"{function.__module__}.{function.__qualname__}"
        function.attempts, function.diagnosis = (), None

    def _keep(self, diagnosis: Diagnosis) -> None:
        if self._function is None:
            self.diagnosis = diagnosis
        else:
            self._function.diagnosis = diagnosis

    def record(self, attempt: Attempt, *, is_healthy: bool = False) -> None:
        """Add an attempt, unless its call succeeded at once, as it was made; several threads may do so at once."""
        attempted(attempt)
        guarded.attempted(attempt)
        if self._function is None and not is_healthy:
            with self._lock:
                self._attempts.append(attempt)

    def forget_attempts(self) -> None:
        """Drop the attempts that are kept."""
        self._attempts.clear()

    def replace(self, attempt: Attempt, now: Attempt) -> None:
        """Put an attempt in the place of one that ended well and has failed since."""
        guarded.died(attempt, now)
        with self._lock:
            kept = [now if one is attempt else one for one in self._attempts]
            self._attempts = deque(kept, maxlen=MAX_ATTEMPTS_KEPT)

    def ended(self, attempts: tuple[Attempt, ...], partial: Partial | None) -> None:
        """Keep what is left of a call: under ``with`` its finished rows, of a function its attempts, where it failed at first."""
        guarded.call_ended()
        if self._function is None:
            self.partial = partial
        elif attempts:
            self._function.attempts = attempts

    def incident(self, diagnosis: Diagnosis) -> None:
        """Keep a diagnosis, and tell the callback."""
        self._keep(diagnosis)
        if self._on_incident is not None and diagnosis.first_cause is not None:
            _tell(self._on_incident, diagnosis.first_cause)

    def patched(self, patch: Patch) -> None:
        """Tell the callback of a patch before it is applied."""
        if self._on_patch is not None:
            _tell(self._on_patch, patch)


@overload
def guard(function: Callable[P, R], /) -> GuardedFunction[P, R]: ...
@overload
def guard(
    function: None = None,
    /,
    *,
    allow: EffectName | None = None,
    floors: Mapping[str, FactValue] | None = None,
    pin: Collection[str] = (),
    batch: str | Collection[str] | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    restart: bool = False,
    start_within_s: float | None = None,
    snapshot: str | Path | None = None,
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
    batch: str | Collection[str] | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    restart: bool = False,
    start_within_s: float | None = None,
    snapshot: str | Path | None = None,
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
        batch: the argument of a decorated function to split by rows, a list, tensor, array, table or a dict of them (a batch of
            columns), or all of them where rows have several (``("texts", "labels")``); its result must be one of these too.
        max_attempts: runs of one call, the first included.
        restart: whether an engine that dies at work is made again as it was where memory was not the cause. For memory it is
            made again with the least that fits, whatever this says.
        snapshot: the file for torch's memory snapshot at the first allocation that fails, taken before anything is freed; torch
            records from CUDA's first use on. No file is overwritten: NAME-1 is next. Where it cannot be taken, a line says so.
        start_within_s: the seconds in which vLLM must have started; one that has not is ended, and raises what vLLM raises where its
            processes died. None: it may take any number.
        on_incident: called with each incident, diagnosed and planned for.
        on_patch: called with each patch before it is applied.

    Raises:
        SettingError: an unknown effect, setting or argument to split, not a time, or a snapshot in no folder.
        UsageError: what is guarded is no function (a class, a number).

    What the guarded code raises comes out unchanged, with the diagnosis in its notes where it is a memory failure.
    """
    if start_within_s is not None and not start_within_s > 0:
        raise SettingError(f"start_within_s={start_within_s!r}", hint="a number of seconds above 0, or None")
    path = snapshot_path(snapshot)
    policy = make_policy(allow, pin, floors, max_relaunches=max_attempts - 1)
    made = Guard(
        policy,
        batch=batch,
        restart=restart,
        start_within_s=start_within_s,
        snapshot=path,
        on_incident=on_incident,
        on_patch=on_patch,
    )
    return made if function is None else made(function)


def _tell(callback: Callable[[Any], object], record: Incident | Patch) -> None:
    """Call a user's callback and log what it raises, which must not take the place of the failure."""
    try:
        callback(record)
    except Exception:
        logger = get_plain_logger()
        logger.exception("a callback failed")
