"""A plugin of vLLM for tests: the real engine, whose scheduler stops, whose steps take long, or whose worker fails, when it is told so.

``HANGING_ORDERS`` names a folder. While a file ``stuck`` lies there the scheduler takes no step; ``slow`` holds the least and the most
seconds that a step takes then; ``fail`` makes the next step raise, and is taken away.
"""

import os
import random
import time
from pathlib import Path


def register() -> None:
    """Let the scheduler and the model runner of this process look for orders."""
    named = os.environ.get("HANGING_ORDERS")
    if not named:
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    orders = Path(named)
    schedule, execute_model = Scheduler.schedule, GPUModelRunner.execute_model

    def schedule_or_stop(self, *args, **kwargs):
        while (orders / "stuck").exists():
            time.sleep(0.1)
        return schedule(self, *args, **kwargs)

    def execute_or_fail(self, scheduler_output, *args, **kwargs):
        if scheduler_output.total_num_scheduled_tokens:
            if (orders / "slow").exists():
                least, most = (orders / "slow").read_text().split()
                time.sleep(random.uniform(float(least), float(most)))
            if (orders / "fail").exists():
                (orders / "fail").unlink()
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return execute_model(self, scheduler_output, *args, **kwargs)

    Scheduler.schedule, GPUModelRunner.execute_model = schedule_or_stop, execute_or_fail
