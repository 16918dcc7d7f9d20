"""Detect that Ray's memory monitor killed an earlier attempt of the current task.

Ray does not report the kill to the next attempt, but the cluster's state shows it.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any, Final

from oomguard.engines.protocol import KilledBefore

_BY: Final = "Ray's memory monitor"
# Ray waits between a kill and the next attempt, and other processes may have ended attempts since.
_RECENT_S: Final = 600.0


def killed_before() -> KilledBefore | None:
    """Return how often the current task was killed for memory, as far as the cluster knows.

    None: never. A first attempt does not ask the cluster, and a later one asks once.
    """
    ray = sys.modules.get("ray")
    try:
        worker = ray._private.worker.global_worker  # type: ignore[union-attr]
        attempt = worker.core_worker.get_current_task_attempt_number()
        if attempt:
            return _killed(
                ray, worker.current_task_id.hex(), attempt, worker.current_job_id.binary()
            )
        return None
    except Exception:  # noqa: BLE001
        # No Ray, another version of it, or a cluster that does not answer.
        return None


@functools.lru_cache(maxsize=64)
def _killed(ray: Any, task: str, attempt: int, job: bytes) -> KilledBefore | None:
    from ray.core.generated import common_pb2, gcs_pb2

    of_memory = common_pb2.WorkerExitType.Value("NODE_OUT_OF_MEMORY")  # type: ignore[attr-defined]
    since_ms = (time.time() - _RECENT_S) * 1000
    kills = 0
    for entry in ray._private.state.state._connect_and_get_accessor().get_worker_table():
        row = gcs_pb2.WorkerTableData.FromString(entry)  # type: ignore[attr-defined]
        kills += row.exit_type == of_memory and row.job_id == job and row.end_time_ms >= since_ms
    if kills:
        return KilledBefore(f"{task}/{attempt}", min(attempt, kills), _BY)
    return None
