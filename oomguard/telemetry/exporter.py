"""A tally as prometheus-client collects it: the families are made when they are asked for, nothing is kept twice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from oomguard.errors import UsageError
from oomguard.installation import install_hint
from oomguard.telemetry.metrics import Metric, Place, metrics
from oomguard.telemetry.tally import Figure, Tally

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    Family = CounterMetricFamily | GaugeMetricFamily


def require_library() -> None:
    """Raise UsageError where prometheus-client is not installed."""
    import importlib.util

    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError(
            "metrics are exported by prometheus-client, which is not installed", hint=install_hint("metrics")
        )


class Exporter:
    """A collector for a registry of prometheus-client.

    It yields families instead of holding counters: those of the library would also be written into the folder of
    PROMETHEUS_MULTIPROC_DIR, which the command inherits and reads back as its own.

    Args:
        tally: what is counted.
        at: the places whose metrics are exported.
        sample: reads what no event changes.
    """

    def __init__(
        self, tally: Tally, at: Collection[Place], sample: Callable[[], Mapping[str, Figure]] | None = None
    ) -> None:
        self._tally, self._sample = tally, sample
        self._metrics = [metric for metric in metrics() if set(metric.at) & set(at)]

    def describe(self) -> Iterator[Family]:
        """Yield the families without values: a registry refuses names that it has."""
        return (_family(metric) for metric in self._metrics)

    def collect(self) -> Iterator[Family]:
        """Yield the families as they are now, without those that have no value."""
        now = {} if self._sample is None else self._sample()
        for metric in self._metrics:
            value = now[metric.figure] if metric.figure in now else self._tally.figure(metric.figure)
            if value is None:
                continue
            family = _family(metric)
            for labels, number in (value if isinstance(value, Mapping) else {(): value}).items():
                family.add_metric(labels, number)
            yield family


def registry_of(exporter: Exporter) -> CollectorRegistry:
    """Return a registry that holds nothing else: a run's own figures are not those of Python or the process."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(exporter)
    return registry


def _family(metric: Metric) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=metric.labels)
