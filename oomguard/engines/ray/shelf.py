"""Store short texts in a Ray cluster's key-value store for other workers of the same job.

The texts last as long as the cluster.
"""

from __future__ import annotations

import sys
from typing import Any, Final

_NAMESPACE: Final = b"oomguard"


class ClusterShelf:
    """The texts of one job; other jobs on the same cluster have their own."""

    def __init__(self, kv: Any, job: str) -> None:
        self._kv = kv
        self._job = job

    def read(self, name: str) -> str | None:
        """Return the text with this name; None without one."""
        found = self._kv._internal_kv_get(self._key(name), namespace=_NAMESPACE)
        if found is None:
            return None
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
