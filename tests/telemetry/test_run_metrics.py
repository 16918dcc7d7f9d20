"""What counts a run hears its events in any order that a run has, and an attempt that never began is none."""

from __future__ import annotations

from oomguard.analyst.attempt_hooks import AttemptHooks, PreStartHook
from oomguard.core.incident import Attempt
from oomguard.telemetry.metrics import Tally
from oomguard.telemetry.run_metrics import RunMetrics


def test_attempt_stopped_before_its_start_is_not_counted():
    tally = Tally()
    along = RunMetrics(tally, lambda: True)
    assert isinstance(along, PreStartHook)
    AttemptHooks((along,)).begins(1, ())
    AttemptHooks((along,)).ended(Attempt(1, {}, exit_status=143, error="exit status 143"))
    assert (tally.attempts, tally.failed_attempts) == (0, 0)


def test_the_command_is_known_while_it_runs_only():
    along = RunMetrics(Tally(), lambda: False)
    along.began(1, None, 7)
    assert along.pid == 7
    along.ended(Attempt(1, {}, exit_status=0))
    assert along.pid is None
