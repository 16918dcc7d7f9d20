"""A plugin of vLLM for tests: the real engine, whose scheduler stops on request.

``HANGING_ORDERS`` names a folder. While it contains a file ``stuck``, the scheduler takes no step.
"""

import os
import time
from pathlib import Path


def register() -> None:
    """Let the scheduler of this process look for orders."""
    named = os.environ.get("HANGING_ORDERS")
    if not named:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    orders = Path(named)
    schedule = Scheduler.schedule

    def schedule_or_stop(self, *args, **kwargs):
        while (orders / "stuck").exists():
            time.sleep(0.1)
        return schedule(self, *args, **kwargs)

    Scheduler.schedule = schedule_or_stop
