"""Put on PYTHONPATH by guarded_run.py: each guard of the process writes down what it saw and
changed.
"""

import contextlib
import json
import os
from pathlib import Path


def _observe(told):
    """Let a guard's own record of attempts, incidents and patches be written to a file too, as
    JSON, a line each.
    """
    from oomguard.guarding.guard import GuardState

    def tell(**values):
        with contextlib.suppress(OSError), Path(told).open("a", encoding="utf-8") as file:
            file.write(json.dumps(values, default=str) + "\n")

    def record(guard, attempt, own=GuardState.record):
        failed = attempt.error or attempt.incident is not None
        tell(attempt=attempt.number, settings=dict(attempt.settings), failed=bool(failed))
        return own(guard, attempt)

    def incident(guard, diagnosis, own=GuardState.incident):
        first = diagnosis.first_cause
        if first is not None:
            tell(cause=first.causes[0].id if first.causes else None, is_oom=first.is_oom)
        return own(guard, diagnosis)

    def patched(guard, patch, own=GuardState.patched):
        tell(
            patch={
                "setting": patch.setting,
                "from": patch.old,
                "to": patch.new,
                "effect": str(patch.effect),
            }
        )
        return own(guard, patch)

    GuardState.record = record
    GuardState.incident = incident
    GuardState.patched = patched


if _told := os.environ.get("GUARD_TOLD"):
    with contextlib.suppress(ImportError):
        _observe(_told)
