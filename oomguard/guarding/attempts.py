"""The explicit form: ``for attempt in oomguard.attempts(batch_size=64): with attempt: …``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, MappingProxyType, TracebackType
from typing import Final

from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import Incident, SettingInForce
from oomguard.core.process_state import disabled
from oomguard.core.settings import setting
from oomguard.diagnosis.diagnose import default_rules
from oomguard.guarding.call_metrics import report_attempt, report_end_of_call
from oomguard.guarding.failure import (
    annotate,
    clear,
    row_bytes_at_failure,
    scan_error,
    snapshot_path,
    take_at,
)
from oomguard.guarding.guard import DEFAULT_MAX_ATTEMPTS, EffectName
from oomguard.probe import torch_memory
from oomguard.probe.snapshot_recorder import Recording
from oomguard.remedy.failed_call import CallModel
from oomguard.remedy.policy import Policy, make_policy
from oomguard.retry.ledger import Ledger

# What a loop ran with after it failed with what it was given, by its line and that.
_ran_with: Final[
    dict[tuple[CodeType, int, tuple[tuple[str, FactValue], ...]], dict[str, FactValue]]
] = {}


class OpenAttempt:
    """One attempt, entered with ``with``: ``settings`` holds the values to use, ``number`` counts
    from 1. After the block, ``error`` names the exception that ended it; "" if none did.

    It swallows a memory failure inside where the next attempt is predicted to fit, and lets
    everything else through.
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
        if error is not None and not disabled():
            take_at(error, self._loop.recording)
        self._inside.close()
        if kind is not None:
            self.error = kind.__name__
        return self._loop.ended(error, self._peak.bytes)

    @property
    def snapshot(self) -> Path | None:
        """The file of the memory snapshot that was taken at the first failure of these attempts;
        None: none was.
        """
        if self._loop.recording is None:
            return None
        return self._loop.recording.taken


class _Loop:
    """The attempts of one ``for`` over ``oomguard.attempts``, which begins with what the last one
    on its line ran with.
    """

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
            self.recording = Recording(snapshot)

    def attempts(self) -> Iterator[OpenAttempt]:
        """Yield an attempt to enter, and another one after each whose failure led to a patch."""
        for number in self.ledger.rounds():
            yield OpenAttempt(self, number)

    def ended(self, error: BaseException | None, peak: int | None) -> bool:
        """Record an attempt; return True, which swallows the exception, where another
        one follows.
        """
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
        clear(error)
        torch_memory.release()
        model = self._model(scanned.first_cause)
        found = self.ledger.diagnose(scanned, default_rules(), given=_facts(model), behind=model)
        return found.first_cause

    def _in_force(self) -> dict[str, SettingInForce]:
        return {
            name: SettingInForce(name, value, True, "given")
            for name, value in self.ledger.settings.items()
        }

    def _model(self, failure: Incident) -> CallModel | None:
        """Return the model behind the failure; None where the body has no batch size."""
        rows = self.ledger.settings.get("batch_size")
        if not isinstance(rows, int) or isinstance(rows, bool):
            return None
        base = torch_memory.live_bytes()
        seen = row_bytes_at_failure(failure, base, rows)
        # The body had not ended, so what its rows need is taken as twice what they held.
        if seen is None:
            needed = None
        else:
            needed = 2 * seen
        left = self.ledger.policy.max_relaunches - len(self.ledger.attempts)
        return CallModel(
            rows, base, needed, seen, is_cached=torch_memory.is_cached(), attempts_left=left
        )


def _facts(model: CallModel | None) -> dict[str, Fact]:
    """Return what rules and reports may know of the failed body."""
    if model is None:
        return {}
    values = {"batch_size": model.rows, "baseline_bytes": model.base_bytes}
    return {
        name: Fact(name, value, "measured") for name, value in values.items() if value is not None
    }


def attempts(
    *,
    allow: EffectName | None = None,
    floors: Mapping[str, FactValue] | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    snapshot: str | Path | None = None,
    **settings: FactValue,
) -> Iterator[OpenAttempt]:
    """Yield attempts until one succeeds, each with settings that are predicted to fit.

    When nothing is left to change, the failure of the last attempt comes out with the diagnosis in
    its notes.

    Args:
        allow: highest effect a patch may have; None: output-preserving, and reduces-capacity on
            what you left alone.
        floors: never go below these values, by setting.
        max_attempts: runs of the body, the first included.
        snapshot: the file for torch's memory snapshot at the first allocation that fails in any of
            them; torch records in each until then. ``attempt.snapshot`` is the file, None where
            nothing failed.
        settings: the values to begin with (``batch_size=64``).

    Raises:
        SettingError: an unknown effect or setting, or a snapshot in no folder.
    """
    start = {setting(name).name: value for name, value in settings.items()}
    policy = make_policy(allow, minimum=floors, max_relaunches=max_attempts - 1)
    caller = sys._getframe(1)
    line = caller.f_code, caller.f_lineno
    return _Loop(policy, start, snapshot_path(snapshot), line).attempts()
