"""Define the exported metrics from metrics.toml, and count what they show."""

from __future__ import annotations

import functools
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from oomguard.core.errors import UsageError
from oomguard.core.incident import Attempt, Patch
from oomguard.core.installation import __version__, install_hint

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    Family = CounterMetricFamily | GaugeMetricFamily


# A tally holds plain numbers, which must equal the journal's. Exporters read them here.

Figure = float | Mapping[tuple[str, ...], float] | None
# The cause of an incident that no rule explains, as in the JSON contract.
UNKNOWN: Final = "unknown"


class Tally:
    """Count the attempts of one run, or of all guarded calls of one process.

    A scrape reads it from another thread.

    Attributes:
        build: the version of oomguard, as a label.
        attempts: the number of attempts that began.
        failed_attempts: the number of attempts that failed.
        failed_seconds: the total time of failed attempts.
        relaunches: the number of attempts after a first one.
        incidents: the number of incidents by kind and cause.
        patches: the number of patches by setting and effect.
        survived_steps: the steps of engines that ran out of memory without ending the engine.
        requests_without_room: the requests that ended because their step alone did not fit.
        prediction_errors: the last ratio by fact.
        began_at: when the current attempt began, in Unix seconds, or None if none runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.build: Mapping[tuple[str, ...], float] = {(__version__,): 1}
        self.attempts = self.failed_attempts = self.relaunches = 0
        self.failed_seconds = 0.0
        self.survived_steps = self.requests_without_room = 0.0
        self.incidents: Counter[tuple[str, ...]] = Counter()
        self.patches: Counter[tuple[str, ...]] = Counter()
        self.prediction_errors: dict[tuple[str, ...], float] = {}
        self.began_at: float | None = None

    def began(self, patches: Iterable[Patch], *, is_relaunch: bool) -> None:
        """Count an attempt that begins, and its new patches."""
        with self._lock:
            self.attempts += 1
            self.relaunches += is_relaunch
            self.patches.update((patch.setting, str(patch.effect)) for patch in patches)
            self.began_at = time.time()

    def ended(self, attempt: Attempt, *, is_stopped: bool = False) -> None:
        """Count the end of an attempt.

        An attempt that the user stopped did not fail, unless it has an incident.
        """
        with self._lock:
            self.began_at = None
            if attempt.incident is not None or not (attempt.succeeded or is_stopped):
                self.failed_attempts += 1
                self.failed_seconds += attempt.seconds
            if attempt.incident is not None:
                causes = attempt.incident.causes
                self.incidents[attempt.incident.kind, causes[0].id if causes else UNKNOWN] += 1
            self.survived_steps += attempt.measured.get("survived_steps", 0)
            self.requests_without_room += attempt.measured.get("requests_without_room", 0)
            self.prediction_errors.update(
                {(fact,): error for fact, error in prediction_errors(attempt).items()}
            )

    def with_survived(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
        """Return the figures of survived steps with those of the attempt that runs."""
        with self._lock:
            return {
                "survived_steps": self.survived_steps + len(steps),
                "requests_without_room": self.requests_without_room
                + sum("ended" in step for step in steps),
            }

    def figure(self, name: str) -> Figure:
        """Return the current value of a figure: a number, numbers by labels, or None if unknown."""
        with self._lock:
            value: Figure = getattr(self, name)
            if isinstance(value, Mapping):
                return dict(value)
            return value


def prediction_errors(attempt: Attempt) -> dict[str, float]:
    """Return by fact the relative difference between an attempt's measured and predicted value."""
    predicted: dict[str, float] = {}
    for patch in attempt.patches:
        predicted.update(patch.predicts)
    found = {}
    for fact, value in predicted.items():
        if value and fact in attempt.measured:
            found[fact] = attempt.measured[fact] / value - 1
    return found


Place = Literal["run", "scrape", "process"]
_FILE: Final = Path(__file__).with_name("metrics.toml")


@dataclass(frozen=True, slots=True)
class Metric:
    """Define one exported metric.

    Attributes:
        name: the full name, as it is scraped.
        type: ``counter`` or ``gauge``.
        labels: the names of its labels, in order.
        figure: the attribute of a tally or a sample with its value.
        at: the places that export it.
        help: one sentence.
    """

    name: str
    type: str
    labels: tuple[str, ...]
    figure: str
    at: tuple[Place, ...]
    help: str


@functools.cache
def metrics() -> tuple[Metric, ...]:
    """Return all metrics in the order of metrics.toml."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["metric"]
    found = []
    for row in rows:
        found.append(Metric(**{**row, "labels": tuple(row["labels"]), "at": tuple(row["at"])}))
    return tuple(found)


# prometheus-client collects a tally: the metric families are made on request, and nothing is stored
# twice.


def require_library() -> None:
    """Raise UsageError if prometheus-client is not installed."""
    import importlib.util

    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError(
            "metrics need prometheus-client, which is not installed",
            hint=install_hint("metrics"),
        )


class Exporter:
    """Collect metrics for a registry of prometheus-client.

    It yields metric families and has no counters of the library. Those would also write into the
    folder of PROMETHEUS_MULTIPROC_DIR, which the command inherits and reads as its own.

    Args:
        tally: the counts.
        at: the places whose metrics are exported.
        sample: reads figures that no event changes.
    """

    def __init__(
        self,
        tally: Tally,
        at: Collection[Place],
        sample: Callable[[], Mapping[str, Figure]] | None = None,
    ) -> None:
        self._tally = tally
        self._sample = sample
        # A guarded call and a run export different metrics of the same table.
        self._metrics = []
        for metric in metrics():
            if set(metric.at) & set(at):
                self._metrics.append(metric)

    def describe(self) -> Iterator[Family]:
        """Yield the families without values; a registry uses them to reject duplicate names."""
        return (_family(metric) for metric in self._metrics)

    def collect(self) -> Iterator[Family]:
        """Yield the current families, without those that have no value."""
        now = {} if self._sample is None else self._sample()
        for metric in self._metrics:
            if metric.figure in now:
                value = now[metric.figure]
            else:
                value = self._tally.figure(metric.figure)
            if value is None:
                continue
            family = _family(metric)
            for labels, number in (value if isinstance(value, Mapping) else {(): value}).items():
                family.add_metric(labels, number)
            yield family


def registry_of(exporter: Exporter) -> CollectorRegistry:
    """Return a registry with this exporter alone, without Python's own metrics."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(exporter)
    return registry


def _family(metric: Metric) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=metric.labels)
