"""``oomguard.enable_metrics``: the guarded calls of this process in the program's own registry."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakSet

from oomguard.errors import SettingError
from oomguard.telemetry import guarded
from oomguard.telemetry.exporter import Exporter, require_library
from oomguard.telemetry.tally import Tally

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_enabled: WeakSet[CollectorRegistry] = WeakSet()
_lock = threading.Lock()


def enable_metrics(registry: CollectorRegistry | None = None) -> None:
    """Count the guarded calls of this process, from here on, for prometheus-client (the extra ``metrics``).

    Counted are calls that run out of memory: their attempts, incidents and changes. A call that succeeds costs nothing. Called
    again for the same registry it changes nothing.

    Args:
        registry: where the metrics are registered; None: prometheus-client's own, which the program exposes.

    Raises:
        UsageError: prometheus-client is not installed.
        SettingError: ``registry`` is no registry.
        ValueError: the registry has other metrics of these names.
    """
    require_library()
    from prometheus_client import REGISTRY, CollectorRegistry

    chosen = REGISTRY if registry is None else registry
    if not isinstance(chosen, CollectorRegistry):
        raise SettingError(
            f"registry is a prometheus_client.CollectorRegistry, not {chosen!r}",
            hint="enable_metrics() takes prometheus-client's own",
        )
    with _lock:
        if chosen not in _enabled:
            tally = Tally()
            chosen.register(Exporter(tally, {"process"}))
            guarded.tallies.append(tally)
            _enabled.add(chosen)
