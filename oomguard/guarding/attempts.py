"""Offer the explicit loop ``for attempt in oomguard.attempts(batch_size=64): …``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, MappingProxyType, TracebackType
from typing import Final

from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import Incident, SettingInForce
from oomguard.core.process import disabled
from oomguard.core.settings import setting
from oomguard.diagnosis import default_rules
from oomguard.guarding.failure import (
    annotate,
    clear,
    row_bytes_at_failure,
    scan_error,
    snapshot_path,
    take_at,
)
from oomguard.guarding.guard import DEFAULT_MAX_ATTEMPTS, EffectName
from oomguard.guarding.intercept import report_attempt, report_end_of_call
from oomguard.probe import torch_memory
from oomguard.probe.snapshot_recorder import SnapshotRecorder
from oomguard.remedy.failed_call import CallModel
from oomguard.remedy.policy import Policy, make_policy
from oomguard.retry import Ledger

# The settings with which a loop succeeded after a failure, by its line and its first settings.
_ran_with: Final[
    dict[tuple[CodeType, int, tuple[tuple[str, FactValue], ...]], dict[str, FactValue]]
] = {}


class OpenAttempt:
    """One attempt, entered with ``with``.

    It swallows a memory failure if the next attempt should fit. All other exceptions leave it.

    Attributes:
        number: its number, from 1.
        settings: the values to use.
        error: after the block, the type of the exception that ended it; "" without one.
    """

    def __init__(self, loop: _Loop, number: int) -> None:
        self.number = number
        self.settings: Mapping[str, FactValue] = MappingProxyType(dict(loop.ledger.settings))
        self.error = ""
        self._loop = loop
        self._inside = contextlib.ExitStack()
        self._peak = torch_memory.MemoryPeak()

    def __enter__(self) -> OpenAttempt:
        recording = self._loop.recording
        if recording is not None and not disabled():
            recording.begin()
            self._inside.callback(recording.end)
        self._inside.enter_context(self._peak)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        # The snapshot must show the memory of the failure, before anything of it is freed.
        if error is not None and not disabled():
            take_at(error, self._loop.recording)
        self._inside.close()
        if kind is not None:
            self.error = kind.__name__
        return self._loop.ended(error, self._peak.bytes)

    @property
    def snapshot(self) -> Path | None:
        """The memory snapshot of the first failure in this loop; None without one."""
        if self._loop.recording is None:
            return None
        return self._loop.recording.taken


class _Loop:
    """The attempts of one loop; it begins with the settings of the last success on its line."""

    def __init__(
        self,
        policy: Policy,
        settings: Mapping[str, FactValue],
        snapshot: Path | None,
        line: tuple[CodeType, int],
    ) -> None:
        self._key = (*line, tuple(sorted(settings.items())))
        self._asked = dict(settings)
        self.ledger = Ledger(policy, {**settings, **_ran_with.get(self._key, {})})
        if snapshot is None:
            self.recording = None
        else:
            self.recording = SnapshotRecorder(snapshot)

    def attempts(self) -> Iterator[OpenAttempt]:
        """Yield an attempt to enter, and another after each failure with a patch."""
        for number in self.ledger.rounds():
            yield OpenAttempt(self, number)

    def ended(self, error: BaseException | None, peak: int | None) -> bool:
        """Record an attempt; return True, to swallow the exception, if another one follows."""
        ledger = self.ledger
        incident = None
        if isinstance(error, Exception) and not disabled():
            incident = self._diagnose(error)
        if error is None and ledger.settings != self._asked:
            _ran_with[self._key] = dict(ledger.settings)
        if error is None:
            name = ""
        else:
            name = type(error).__name__
        report_attempt(
            ledger.end(incident, error=name, measured={} if peak is None else {"peak_bytes": peak})
        )
        if error is not None and incident is not None:
            if ledger.choose(incident, ledger.settings.__contains__):
                return True
            annotate(error, incident, ledger.attempts)
        report_end_of_call()
        return False

    def _diagnose(self, error: Exception) -> Incident | None:
        scanned = scan_error(error, self._in_force())
        if scanned.first_cause is None:
            return None
        # The frames hold the failed body's tensors, which would count as memory from before it.
        clear(error)
        torch_memory.release()
        model = self._model(scanned.first_cause)
        found = self.ledger.diagnose(
            scanned, default_rules(), given=_facts(model), memory_model=model
        )
        return found.first_cause

    def _in_force(self) -> dict[str, SettingInForce]:
        in_force = {}
        for name, value in self.ledger.settings.items():
            in_force[name] = SettingInForce(name, value, True, "given")
        return in_force

    def _model(self, failure: Incident) -> CallModel | None:
        """Return the model behind the failure; None if the body has no batch size."""
        rows = self.ledger.settings.get("batch_size")
        if not isinstance(rows, int) or isinstance(rows, bool):
            return None
        base = torch_memory.live_bytes()
        seen = row_bytes_at_failure(failure, base, rows)
        # The body did not finish, so its rows are assumed to need twice what they held.
        if seen is None:
            needed = None
        else:
            needed = 2 * seen
        left = self.ledger.policy.max_attempts - 1 - len(self.ledger.attempts)
        return CallModel(
            rows, base, needed, seen, is_cached=torch_memory.is_cached(), attempts_left=left
        )


def _facts(model: CallModel | None) -> dict[str, Fact]:
    """Return the facts of the failed body for rules and reports."""
    if model is None:
        return {}
    values = {"batch_size": model.rows, "baseline_bytes": model.base_bytes}
    facts = {}
    for name, value in values.items():
        if value is not None:
            facts[name] = Fact(name, value, "measured")
    return facts


def attempts(
    *,
    allow: EffectName | None = None,
    floors: Mapping[str, FactValue] | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    snapshot: str | Path | None = None,
    **settings: FactValue,
) -> Iterator[OpenAttempt]:
    """Yield attempts until one succeeds, each with settings that should fit.

        for attempt in oomguard.attempts(batch_size=64):
            with attempt:
                run(batch_size=attempt.settings["batch_size"])

    If nothing is left to change, the last attempt's exception is raised with the diagnosis in its
    notes.

    Args:
        allow: the highest permitted effect; None: keep outputs the same; reduce capacity only for
            settings that you did not set.
        floors: the lowest permitted values by setting.
        max_attempts: the number of attempts, with the first one.
        snapshot: the file for torch's memory snapshot of the first failed allocation; None: no
            snapshot. ``attempt.snapshot`` is the written file.
        settings: the values to begin with (``batch_size=64``).

    Raises:
        SettingError: an effect or a setting is unknown, or the snapshot's folder does not exist.
    """
    start = {setting(name).name: value for name, value in settings.items()}
    policy = make_policy(allow, minimum=floors, max_attempts=max_attempts)
    caller = sys._getframe(1)
    line = caller.f_code, caller.f_lineno
    return _Loop(policy, start, snapshot_path(snapshot), line).attempts()
