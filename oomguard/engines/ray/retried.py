"""A task that Ray runs again after its memory monitor has killed the worker that ran it: Ray tells
it nothing of that, the cluster does.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any, Final

from oomguard.engines.protocol import KilledBefore

_BY: Final = "Ray's memory monitor"
# A kill comes before the task's next attempt by as long as Ray waits, and looks for a place: others
# may have ended an attempt since.
_RECENT_S: Final = 600.0


def killed_before() -> KilledBefore | None:
    """Return how often what runs in this process now was killed for memory before, as far as the
    cluster tells; None: never.

    A first attempt asks nobody, and a later one once.
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
        # without Ray, in another version of it, or of a cluster that does not answer: as it was
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
