"""Guard Ray's remote functions and actor classes, and learn what happened to their tasks before.

The code inside is guarded, and Ray makes the remote function or actor class again. Each task then
runs in a worker process: the cluster's state shows whether an earlier attempt was killed, and its
key-value store holds texts for the other workers of the same job.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from oomguard.engines.protocol import KilledBefore

_BY: Final = "Ray's memory monitor"
# Ray waits between a kill and the next attempt, and other processes may have ended attempts since.
_RECENT_S: Final = 600.0
_NAMESPACE: Final = b"oomguard"


def guarded(function: object, decorate: Callable[..., Any]) -> Any | None:
    """Return a remote function or an actor class with its code under ``decorate``.

    None for anything else.

    Args:
        function: the object to guard.
        decorate: guards one function; its ``is_method`` says that it is one of several, which need
            not all be split.
    """
    ray = sys.modules.get("ray")
    if ray is None:
        return None
    if isinstance(function, ray.remote_function.RemoteFunction):
        return _again(ray, decorate(function._function), function._default_options)
    if isinstance(function, ray.actor.ActorClass):
        plain = function.__ray_metadata__.modified_class.__ray_actor_class__
        return _again(ray, _guarded_class(plain, decorate), function._default_options)
    return None


def _again(ray: Any, code: Any, options: dict[str, Any]) -> Any:
    """Return the code as Ray's, with the user's options; Ray sets its own options again."""
    chosen = {}
    for name, value in options.items():
        if not name.startswith("_"):
            chosen[name] = value
    if chosen:
        return ray.remote(**chosen)(code)
    # Ray refuses an empty list of options.
    return ray.remote(code)


def _guarded_class(plain: type, decorate: Callable[..., Any]) -> type:
    """Return a subclass of ``plain`` whose methods are guarded.

    ``__init__`` is one of them, because it may start an engine.
    """
    namespace: dict[str, Any] = {}
    # From the last base class to the first, so that an overriding method replaces the one below.
    for owner in reversed(plain.__mro__[:-1]):
        for name, value in vars(owner).items():
            is_called_by_ray = not name.startswith("_") or name in ("__init__", "__call__")
            if is_called_by_ray and inspect.isfunction(value):
                namespace[name] = decorate(value, is_method=True)
    # Ray shows these names in its dashboard and in errors.
    for name in ("__module__", "__qualname__", "__doc__"):
        namespace[name] = getattr(plain, name)
    return type(plain.__name__, (plain,), namespace)


def killed_before() -> KilledBefore | None:
    """Return how often the current task was killed for memory, as far as the cluster knows.

    None: never. Ray does not report the kill to the next attempt. A first attempt does not ask the
    cluster, and a later one asks once.
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


class ClusterShelf:
    """The texts of one job, which last as long as the cluster; other jobs have their own."""

    def __init__(self, kv: Any, job: str) -> None:
        self._kv = kv
        self._job = job

    def read(self, name: str) -> str | None:
        """Return the text with this name; None without one."""
        found = self._kv._internal_kv_get(self._key(name), namespace=_NAMESPACE)
        if found is None:
            return None
        # Another version of oomguard on the cluster may have written other bytes.
        return bytes(found).decode("utf-8", "replace")

    def write(self, name: str, text: str) -> None:
        """Store a text under this name, replacing an earlier one."""
        self._kv._internal_kv_put(
            self._key(name), text.encode(), overwrite=True, namespace=_NAMESPACE
        )

    def _key(self, name: str) -> bytes:
        return f"sizes:{self._job}:{name}".encode()


def shelf() -> ClusterShelf | None:
    """Return the store for this process's job; None without a connection to a cluster."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    from ray.experimental import internal_kv

    return ClusterShelf(internal_kv, ray.get_runtime_context().get_job_id())
