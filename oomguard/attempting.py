"""The explicit form: ``for attempt in oomguard.attempts(batch_size=64): with attempt: …``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType, TracebackType

from oomguard.diagnosing import assess_all, default_rules
from oomguard.engines.transformers import GenerateCall
from oomguard.facts import Fact, FactValue
from oomguard.guarding import DEFAULT_MAX_ATTEMPTS, EffectName, FailedCall, noting_failed_calls
from oomguard.incident import Attempt, Diagnosis, Incident, Patch, SettingInForce
from oomguard.memory.derive import derive
from oomguard.observe import torch_memory
from oomguard.observe.exceptions import chain
from oomguard.remedy.planner import next_patch
from oomguard.remedy.policy import Policy, make_policy
from oomguard.remedy.settings import setting
from oomguard.splitting import annotate, clear, row_bytes_at_failure, scan_error, traced_facts
from oomguard.switch import disabled


class AttemptBlock:
    """One attempt, entered with ``with``: ``settings`` holds the values to use, ``number`` counts from 1.

    A memory failure inside is swallowed where the next attempt is predicted to fit; everything else is raised.
    """

    def __init__(self, run: _Run, number: int, settings: Mapping[str, FactValue]) -> None:
        self.number = number
        self.settings: Mapping[str, FactValue] = MappingProxyType(dict(settings))
        self._run = run
        self._started = 0.0
        self._noting: contextlib.ExitStack | None = None
        self._failed_calls: list[FailedCall] = []

    def __enter__(self) -> AttemptBlock:
        if not disabled():
            self._noting = contextlib.ExitStack()
            self._failed_calls = self._noting.enter_context(noting_failed_calls())
        torch_memory.reset_peak()
        self._started = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        seconds = time.monotonic() - self._started
        if self._noting is not None:
            self._noting.close()
        try:
            return self._run.ended(self, error, seconds, self._failed_calls)
        finally:
            self._failed_calls.clear()


class _Run:
    def __init__(self, policy: Policy, settings: Mapping[str, FactValue]) -> None:
        self.policy = policy
        self.settings = dict(settings)
        self.attempts: list[Attempt] = []
        self.diagnosis: Diagnosis | None = None
        self.finished = False
        self._pending: tuple[Patch, ...] = ()
        self._tried: set[tuple[str, FactValue]] = set()

    def ended(self, block: AttemptBlock, error: BaseException | None, seconds: float, calls: list[FailedCall]) -> bool:
        """Record an attempt; True (swallow the exception) where another one follows."""
        patches, self._pending = self._pending, ()
        peak = torch_memory.peak_bytes()
        measured: dict[str, float] = {} if peak is None else {"peak_bytes": peak}
        incident = None
        if isinstance(error, Exception) and not disabled():
            incident = self._diagnose(error, calls)
        name = "" if error is None else type(error).__name__
        self.attempts.append(
            Attempt(
                block.number, dict(block.settings), patches, incident, error=name, seconds=seconds, measured=measured
            )
        )
        if error is None or incident is None:
            self.finished = True
            return False
        patch = next_patch(incident)
        if (
            patch is None
            or patch.new is None
            or patch.setting not in self.settings
            or block.number > self.policy.max_relaunches
        ):
            annotate(error, incident, self.attempts)
            self.finished = True
            return False
        self._pending = (patch,)
        self._tried.add((patch.setting, patch.new))
        self.settings[patch.setting] = patch.new
        return True

    def _diagnose(self, error: Exception, calls: list[FailedCall]) -> Incident | None:
        scanned = scan_error(error, self._in_force())
        if scanned.first_cause is None:
            return None
        clear(error)
        torch_memory.release()
        own = next((call for raised, call in calls if any(link is raised for link in chain(error))), None)
        given = self._facts(scanned.first_cause, own)
        self.diagnosis = assess_all(scanned, default_rules(), self.policy, self._tried, given=given)
        return self.diagnosis.first_cause

    def _in_force(self) -> dict[str, SettingInForce]:
        return {name: SettingInForce(name, value, True, "given") for name, value in self.settings.items()}

    def _facts(self, failure: Incident, failed_call: GenerateCall | None) -> dict[str, Fact]:
        rows = self.settings.get("batch_size")
        if not isinstance(rows, int) or isinstance(rows, bool):
            return {}
        base = torch_memory.live_bytes()
        at_failure = row_bytes_at_failure(failure, base, rows)
        # The body had not ended, so what its rows need is taken as twice what they held.
        needed = None if at_failure is None else 2 * at_failure
        values = {
            "batch_size": rows, "baseline_bytes": base, "row_bytes": needed, "row_bytes_at_failure": at_failure,
            "caching_allocator": torch_memory.is_cached(),
        }  # fmt: skip
        facts = {name: Fact(name, value, "measured") for name, value in values.items() if value is not None}
        # A call of generate on all these rows tells what fewer of them need; where such a size failed too, it does not.
        tells = failed_call is not None and failed_call.rows == rows and not self._tried
        traced = failed_call.traced() if failed_call is not None and tells else None
        if traced is not None:
            facts |= traced_facts(derive(replace(failure, facts={**facts, **failure.facts})), traced, rows)
        return facts


def attempts(
    *,
    allow: EffectName | None = None,
    floors: Mapping[str, FactValue] | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    **settings: FactValue,
) -> Iterator[AttemptBlock]:
    """Yield attempts until one succeeds, each with settings that are predicted to fit.

    ``settings`` are the values to begin with (``batch_size=64``). When nothing is left to change, the failure of the
    last attempt is raised with the diagnosis in its notes. Raises SettingError for an unknown setting.
    """
    start = {setting(name).name: value for name, value in settings.items()}
    run = _Run(make_policy(allow, minimum=floors, max_relaunches=max_attempts - 1), start)
    return _attempts(run)


def _attempts(run: _Run) -> Iterator[AttemptBlock]:
    number = 1
    while not run.finished:
        yield AttemptBlock(run, number, run.settings)
        number += 1
