"""What is exported, from metrics.toml: names, labels and help texts stand once."""

from __future__ import annotations

import functools
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from oomguard._version import __version__
from oomguard.core.errors import UsageError
from oomguard.core.incident import Attempt, Patch
from oomguard.core.installation import install_hint

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    Family = CounterMetricFamily | GaugeMetricFamily


# The tally of attempts: plain numbers, which the journal's must equal; whoever exports them reads
# them here.

Figure = float | Mapping[tuple[str, ...], float] | None
# The cause of an incident that no rule explains, as the contract has it.
UNKNOWN: Final = "unknown"


class Tally:
    """What the attempts of one run came to, or of all guarded calls of one process. A scrape reads
    it from another thread.

    Attributes:
        build: oomguard's version, as a label.
        attempts: those that began.
        failed_attempts: those that failed.
        failed_seconds: how long they ran.
        relaunches: those after a first one.
        incidents: by kind and cause.
        patches: by setting and effect.
        prediction_errors: the last ratio by fact.
        began_at: Unix seconds at which the attempt under way began; None while none runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.build: Mapping[tuple[str, ...], float] = {(__version__,): 1}
        self.attempts = self.failed_attempts = self.relaunches = 0
        self.failed_seconds = 0.0
        self.incidents: Counter[tuple[str, ...]] = Counter()
        self.patches: Counter[tuple[str, ...]] = Counter()
        self.prediction_errors: dict[tuple[str, ...], float] = {}
        self.began_at: float | None = None

    def began(self, patches: Iterable[Patch], *, is_relaunch: bool) -> None:
        """Count an attempt that begins, with what is new in it."""
        with self._lock:
            self.attempts += 1
            self.relaunches += is_relaunch
            self.patches.update((patch.setting, str(patch.effect)) for patch in patches)
            self.began_at = time.time()

    def ended(self, attempt: Attempt, *, is_stopped: bool = False) -> None:
        """Count how an attempt ended that began; one that its user stopped did not fail, unless it
        has an incident.
        """
        with self._lock:
            self.began_at = None
            if attempt.incident is not None or not (attempt.succeeded or is_stopped):
                self.failed_attempts += 1
                self.failed_seconds += attempt.seconds
            if attempt.incident is not None:
                causes = attempt.incident.causes
                self.incidents[attempt.incident.kind, causes[0].id if causes else UNKNOWN] += 1
            self.prediction_errors.update(
                {(fact,): error for fact, error in prediction_errors(attempt).items()}
            )

    def figure(self, name: str) -> Figure:
        """Return one figure as it is now: a number, or numbers by their labels; None where there is
        none.
        """
        with self._lock:
            value: Figure = getattr(self, name)
            if isinstance(value, Mapping):
                return dict(value)
            return value


def prediction_errors(attempt: Attempt) -> dict[str, float]:
    """Return by fact how far an attempt's measured value is from the predicted one, as a share of
    it.
    """
    predicted = {fact: value for patch in attempt.patches for fact, value in patch.predicts.items()}
    return {
        fact: attempt.measured[fact] / value - 1
        for fact, value in predicted.items()
        if value and fact in attempt.measured
    }


Place = Literal["run", "scrape", "process"]
_FILE: Final = Path(__file__).with_name("metrics.toml")


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric.

    Attributes:
        name: the whole name, as it is scraped.
        type: ``counter`` or ``gauge``.
        labels: names of its labels, in order.
        figure: the attribute of a tally or a sample that holds it.
        at: where it is exported.
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
    """Return all metrics, in the order of their file."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["metric"]
    return tuple(
        Metric(**{**row, "labels": tuple(row["labels"]), "at": tuple(row["at"])}) for row in rows
    )


# A tally as prometheus-client collects it: the families are made when they are asked for, nothing
# is kept twice.


def require_library() -> None:
    """Raise UsageError where prometheus-client is not installed."""
    import importlib.util

    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError(
            "metrics are exported by prometheus-client, which is not installed",
            hint=install_hint("metrics"),
        )


class Exporter:
    """A collector for a registry of prometheus-client.

    It yields families instead of holding counters: those of the library would also be written into
    the folder of PROMETHEUS_MULTIPROC_DIR, which the command inherits and reads back as its own.

    Args:
        tally: what is counted.
        at: the places whose metrics are exported.
        sample: reads what no event changes.
    """

    def __init__(
        self,
        tally: Tally,
        at: Collection[Place],
        sample: Callable[[], Mapping[str, Figure]] | None = None,
    ) -> None:
        self._tally = tally
        self._sample = sample
        self._metrics = [metric for metric in metrics() if set(metric.at) & set(at)]

    def describe(self) -> Iterator[Family]:
        """Yield the families without values: a registry refuses names that it has."""
        return (_family(metric) for metric in self._metrics)

    def collect(self) -> Iterator[Family]:
        """Yield the families as they are now, without those that have no value."""
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
    """Return a registry that holds nothing else: a run's own figures are not those of Python or the
    process.
    """
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(exporter)
    return registry


def _family(metric: Metric) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=metric.labels)
