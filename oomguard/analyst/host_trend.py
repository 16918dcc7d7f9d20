"""Forecast when the host's memory is full, for commands that run for hours.

A leak of host memory shows for hours before the kernel kills a container. A thread of the analyst
samples the memory once a minute, without the page cache. It draws a line only through memory that
still grows as it did, so warm-up, plateaus, saw-teeth and caches cause no alarm.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

from oomguard.core.facts import format_gib
from oomguard.core.log import get_logger
from oomguard.supervisor import tree
from oomguard.supervisor.host_memory import LIMIT, HostMemory, Level, tree_pids

if TYPE_CHECKING:
    from oomguard.core.incident import Attempt
    from oomguard.engines.command import Launch

SAMPLE_S: Final = 60.0
_HOUR_S: Final = 3600.0
# The first minutes load weights, compile and fill caches.
_WARM_UP_S: Final = 1800.0
_WINDOWS_S: Final = (3 * _HOUR_S, 6 * _HOUR_S, 12 * _HOUR_S, 24 * _HOUR_S)
_MOST_SAMPLES: Final = 1440
# Of each part of a window the least counts, so short peaks do not.
_PARTS: Final = 16
# A forecast reaches as far as the time in which the growth was seen.
_REACH_RATIO: Final = 1.0
# Growth that slows down ends by itself.
_SLOWED_RATIO: Final = 0.8
_UNEVEN_RATIO: Final = 2.5
# Each half grows at least by this part of the whole window's slope, or a jump lies between them.
_HALF_RATIO: Final = 0.5
# Less growth than this part of the limit in a window is noise.
_LEAST_GROWTH_RATIO: Final = 0.02
# Below this part of the limit, a growing cache is more likely than a leak.
_LEAST_FILL_RATIO: Final = 0.75
# The command must have caused at least this part of the growth.
_OWN_RATIO: Final = 0.5
_STEPS_S: Final = (24 * _HOUR_S, 1 * _HOUR_S)


class Forecast(NamedTuple):
    """Forecast when memory is full: the growth in bytes per second and the seconds left."""

    growth_bytes: float
    full_in_s: float


@dataclass(slots=True)
class Trend:
    """Hold a bounded series of memory in use and find its robust slope.

    Attributes:
        limit_bytes: the size at which the memory is full.
    """

    limit_bytes: int
    _samples: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=_MOST_SAMPLES)
    )
    _began_s: float | None = None

    def add(self, at_s: float, used_bytes: float) -> None:
        """Add a sample; one from before the last one is left out."""
        if self._began_s is None:
            self._began_s = at_s
        if at_s - self._began_s < _WARM_UP_S:
            return
        if not self._samples or at_s > self._samples[-1][0]:
            self._samples.append((at_s, used_bytes))

    def forecast(self) -> Forecast | None:
        """Return the forecast of the shortest window that gives one; None without a trend."""
        for window_s in _WINDOWS_S:
            found = self._of_window(window_s)
            if found is not None:
                return found
        return None

    def _of_window(self, window_s: float) -> Forecast | None:
        now_s = self._samples[-1][0] if self._samples else 0.0
        inside = []
        for one in self._samples:
            if now_s - one[0] <= window_s:
                inside.append(one)
        if not inside or now_s - inside[0][0] < 0.9 * window_s:
            return None
        points = _floors(inside, now_s - window_s, window_s)
        if len(points) < _PARTS * 0.75:
            return None
        growth = slope(points)
        used = min(size for _, size in points[-2:])
        if growth <= 0:
            return None
        recent_s = now_s - window_s / _PARTS
        peak = 0.0
        for at_s, size in inside:
            if at_s >= recent_s:
                peak = max(peak, size)
        left_s = (self.limit_bytes - peak) / growth
        if left_s > window_s * _REACH_RATIO or used < _LEAST_FILL_RATIO * self.limit_bytes:
            return None
        if growth * window_s < _LEAST_GROWTH_RATIO * self.limit_bytes:
            return None
        # Memory that was this high before has gone down since, so the growth is not a leak.
        most_before = 0.0
        for at_s, size in self._samples:
            if now_s - at_s > window_s:
                most_before = max(most_before, size)
        if used < most_before or not is_steady(points):
            return None
        return Forecast(growth, max(0.0, left_s))


def _floors(
    samples: Sequence[tuple[float, float]], begin_s: float, window_s: float
) -> list[tuple[float, float]]:
    """Return the least sample of each part of a window, at the time at which it was taken."""
    lowest: dict[int, tuple[float, float]] = {}
    for at_s, size in samples:
        part = min(_PARTS - 1, int((at_s - begin_s) / window_s * _PARTS))
        if part not in lowest or size < lowest[part][1]:
            lowest[part] = (at_s, size)
    return [lowest[part] for part in sorted(lowest)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope of all pairs of points (Theil-Sen); outliers do not move it."""
    slopes = []
    for number, (before_s, before) in enumerate(points):
        for at_s, size in points[number + 1 :]:
            slopes.append((size - before) / (at_s - before_s))
    return statistics.median(slopes)


def is_steady(points: Sequence[tuple[float, float]]) -> bool:
    """Return whether the second half grows like the first, and no single jump is the growth."""
    middle = len(points) // 2
    first = slope(points[: middle + 1])
    second = slope(points[middle:])
    if min(first, second) < _HALF_RATIO * slope(points):
        return False
    return _SLOWED_RATIO * first <= second <= _UNEVEN_RATIO * first


class MemorySample(NamedTuple):
    """Hold one look: what is full first, what it has in use, and the command's own memory."""

    level: Level
    used_bytes: int
    own_bytes: Mapping[int, int]


def read_sample(memory: HostMemory, root: int) -> MemorySample | None:
    """Read the memory of the machine or limit, and the private and shared memory of a tree."""
    node = memory.node()
    levels = [*memory.limits(), *([] if node is None else [node])]
    if not levels:
        return None
    level = min(levels, key=lambda one: one.available_bytes)
    own = {pid: own_bytes(pid) for pid in tree_pids(root)}
    return MemorySample(level, level.total_bytes - level.available_bytes, own)


def own_bytes(pid: int) -> int:
    """Return the private and shared memory of a process, without its files; 0 if it is gone."""
    try:
        text = tree.read_file(f"/proc/{pid}/status")
    except OSError:
        return 0
    found = 0
    for name in (b"\nRssAnon:", b"\nRssShmem:"):
        words = text.partition(name)[2].split(None, 1)
        if words and words[0].isdigit():
            found += int(words[0]) * 1024
    return found


@dataclass(slots=True)
class HostTrend:
    """Watch the trend of the host's memory, as a hook of the run.

    Attributes:
        root: the process above all of the command's processes.
        memory: reads the figures; None for this machine.
        forecast: the present forecast; None without a trend.
    """

    root: int
    memory: HostMemory | None = None
    forecast: Forecast | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def began(self, _number: int, _launch: Launch, _pid: int | None) -> None:
        """Begin to watch an attempt."""
        self._over = threading.Event()
        threading.Thread(
            target=self._watch, args=(self._over,), name="oomguard-trend", daemon=True
        ).start()

    def ended(self, _attempt: Attempt) -> None:
        """Stop watching."""
        self._over.set()
        self.forecast = None

    def _watch(self, over: threading.Event) -> None:
        memory = self.memory or HostMemory()
        watched = Growth()
        while not over.wait(SAMPLE_S):
            sample = read_sample(memory, self.root)
            if sample is None:
                return
            self.forecast = watched.add(monotonic(), sample)
            line = watched.line(self.forecast)
            if line is not None:
                get_logger().warning(line)


class Growth:
    """Hold the trends of one attempt, and the processes of the samples that they begin with."""

    def __init__(self) -> None:
        self._trend: Trend | None = None
        self._key: tuple[str, int] | None = None
        self._level: Level | None = None
        self._looks: deque[tuple[float, Mapping[int, int]]] = deque(maxlen=_MOST_SAMPLES)
        self._passed = 0

    def add(self, at_s: float, sample: MemorySample) -> Forecast | None:
        """Add a sample; return the forecast if the command causes the growth."""
        key = (sample.level.scope, sample.level.total_bytes)
        if self._trend is None or key != self._key:
            self._trend = Trend(sample.level.total_bytes)
            self._key = key
        self._level = sample.level
        self._trend.add(at_s, sample.used_bytes)
        self._looks.append((at_s, _largest(sample.own_bytes)))
        found = self._trend.forecast()
        if found is None:
            return None
        grown = sum(self._growths().values())
        if grown < _OWN_RATIO * found.growth_bytes:
            return None
        return found

    def _growths(self) -> dict[int, float]:
        """Return how fast each process grew in the last hour, in bytes per second."""
        now_s, now = self._looks[-1]
        began_s, before = next(look for look in self._looks if now_s - look[0] <= _HOUR_S)
        took_s = max(1.0, now_s - began_s)
        return {pid: (size - before.get(pid, 0)) / took_s for pid, size in now.items()}

    def line(self, found: Forecast | None) -> str | None:
        """Return the line for a new step of the forecast, below 24 hours and below 1 hour."""
        if found is None or self._level is None:
            return None
        passed = sum(found.full_in_s < step_s for step_s in _STEPS_S)
        if passed <= self._passed:
            return None
        self._passed = passed
        growths = self._growths()
        pid = max(growths, key=lambda one: growths[one])
        name = tree.name_of(pid) or "A process"
        where = {True: "container's", False: "machine's"}[self._level.scope == LIMIT]
        return (
            f"{name} pid {pid} grows by {format_gib(growths[pid] * _HOUR_S, 1)}/h; the {where} "
            f"{format_gib(self._level.total_bytes, 1)} will be full in about "
            f"{in_words(found.full_in_s)}"
        )


def _largest(sizes: Mapping[int, int], count: int = 16) -> Mapping[int, int]:
    """Return the largest processes, so that a tree that changes each second stays bounded."""
    return dict(sorted(sizes.items(), key=lambda one: -one[1])[:count])


def in_words(seconds: float) -> str:
    """Return a time to come in hours or minutes."""
    if seconds >= 2 * _HOUR_S:
        return f"{seconds / _HOUR_S:.0f} h"
    return f"{max(1, round(seconds / 60))} min"
