"""The watch: a context manager and a decorator that see what memory was before, at most during, and after.

It changes nothing: what the body does, and what it raises, is as without it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, overload

from oomguard.engines.known import watch_seen_calls
from oomguard.engines.protocol import SizeOfCall
from oomguard.errors import SettingError, UsageError
from oomguard.guarding.observing import NO_SIZE, Told, observers, observing, shown, without_mistake
from oomguard.guarding.watching import watch as watch_calls
from oomguard.instrumentation.decorating import decorate
from oomguard.instrumentation.ended_call import EndedCall
from oomguard.instrumentation.measured import Measured
from oomguard.instrumentation.outside import Outside
from oomguard.instrumentation.readings import Bytes
from oomguard.instrumentation.rows import Rows
from oomguard.instrumentation.sampler import readings, sampler
from oomguard.instrumentation.span import Span
from oomguard.instrumentation.watched import Watched
from oomguard.instrumentation.writing import refuse_other_format, write
from oomguard.switch import disabled
from oomguard.timeline import Mark, MemoryUse, SeenCall, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_SAMPLE_EVERY_S: Final = 0.1
_MOST_MARKS: Final = 10_000
_OFF: Final = "OOMGUARD_DISABLE is set: nothing is watched"


class Watch:
    """What one ``oomguard.watch`` sees; ``print`` shows it as a table.

    Attributes:
        sample_every_s: seconds between two samples.
    """

    def __init__(self, *, sample_every_s: float = DEFAULT_SAMPLE_EVERY_S) -> None:
        self.sample_every_s = sample_every_s
        self._lock = threading.RLock()
        self._entered = 0
        self._error = ""
        self._measured, self._rows = Measured(), Rows()
        self._marks: list[Mark] = []
        self._under_way: list[Watched] = []
        self._outside = Outside()

    def __enter__(self) -> Watch:
        if disabled():
            return self
        watch_calls()
        watch_seen_calls(shown)
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                without_mistake(self._begin)
        observers.set((*observers.get(), self))
        observing.append(None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(kind)

    def leave(self, kind: type[BaseException] | None = None, *, stays: bool = False) -> None:
        """Leave what was entered, and end with the last of it.

        Args:
            kind: what is raised.
            stays: whether the sampling thread waits a moment for who enters again.
        """
        with self._lock:
            if not self._entered:
                return
            self._entered -= 1
            self._error = "" if kind is None else kind.__name__
            thread = None
            if not self._entered:
                without_mistake(self._measured.end)
                thread = sampler.remove(self, stays=stays)
        if thread is not None:
            thread.join()
        observing.pop()
        seen = list(observers.get())
        if self in seen:
            del seen[len(seen) - 1 - seen[::-1].index(self)]
            observers.set(tuple(seen))

    async def __aenter__(self) -> Watch:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *_raised: object) -> None:
        self.leave(kind)

    def __call__(self, function: F) -> F:
        """Watch every call of a function: sync, async, generator or async generator, also a method; ``function.seen`` is this."""
        return decorate(self, function)

    def __repr__(self) -> str:
        return f"<oomguard.Watch: calls and spans: {sum(row.calls for row in self.rows):,}>"

    def __str__(self) -> str:
        from oomguard.report.timeline_table import table_text

        return table_text(self.timeline)

    def _repr_png_(self) -> bytes | None:
        """Return the plot for a notebook's cell; None if matplotlib is not installed."""
        from oomguard.report.timeline_plot import png

        try:
            return png(self.timeline)
        except UsageError:
            return None

    @property
    def began_s(self) -> float:
        """When it was first entered, on the clock of ``time.monotonic``."""
        return self._measured.began_s

    @property
    def limits(self) -> Bytes:
        """What each device has, as far as it was seen."""
        return self._measured.limits

    @property
    def timeline(self) -> Timeline:
        """All that was seen so far, as one record."""
        with self._lock:
            uses, measured = self._measured.uses(), self._measured
            ended_s = time.monotonic() if self._entered else measured.ended_s
            return Timeline(
                seconds=0.0 if ended_s is None else ended_s - measured.began_s,
                uses=uses,
                rows=self._rows.all(),
                marks=tuple(self._marks),
                samples=measured.samples.all(),
                sample_every_s=self.sample_every_s,
                limits=dict(measured.limits),
                error=self._error,
                notes=(_OFF,) if ended_s is None and disabled() else (),
            )

    @property
    def rows(self) -> tuple[SeenCall, ...]:
        """Every call and span that ended, in the order in which they began."""
        with self._lock:
            return self._rows.all()

    @property
    def uses(self) -> tuple[MemoryUse, ...]:
        """Every counter of every device: before the watch, at most during it, and after it (up to now, while it goes on)."""
        with self._lock:
            return self._measured.uses()

    def mark(self, label: object) -> None:
        """Note this moment under a label, taken as text, with what the counters show; outside the watch warn that it is not noted."""
        if self._entered:
            without_mistake(self._mark, str(label))
        else:
            without_mistake(self._outside.tell, "mark", label)

    def span(self, label: object) -> Span:
        """Give a phase of your own a row: memory before it, at most, and after; outside the watch warn that it has none.

        Args:
            label: any value, taken as text.
        """
        return Span(self, label)

    def table(self, *, most_rows: int = 20) -> Any:
        """Return the tables for a console of rich: memory by counter, then the calls.

        Args:
            most_rows: of more calls, those that failed and those of the largest peaks are shown.
        """
        from oomguard.report.timeline_table import tables

        return tables(self.timeline, most_rows=most_rows)

    def to_csv(self, path: str | PathLike[str], *, samples: bool = False) -> None:
        """Write one line for each row and counter, sizes in bytes; with ``samples`` one for each sample and counter.

        Raises:
            UsageError: the file cannot be written.
        """
        from oomguard.report.timeline_csv import rows_csv, samples_csv

        write(path, (samples_csv if samples else rows_csv)(self.timeline).encode())

    def to_trace(self, path: str | PathLike[str]) -> None:
        """Write the timeline as Chrome trace JSON, for example ``watch.trace.json``, to open at ui.perfetto.dev.

        Raises:
            UsageError: the file cannot be written.
        """
        from oomguard.report.timeline_trace import trace_json

        write(path, trace_json(self.timeline).encode())

    def plot(self) -> Figure:
        """Return the timeline as a figure of matplotlib.

        Raises:
            UsageError: matplotlib is not installed.
        """
        from oomguard.report.timeline_plot import figure

        return figure(self.timeline)

    def to_png(self, path: str | PathLike[str]) -> None:
        """Write the plot as PNG.

        Raises:
            UsageError: matplotlib is not installed, the name is that of another format, or the file cannot be written.
        """
        refuse_other_format(path)
        from oomguard.report.timeline_plot import png

        write(path, png(self.timeline))

    def to_html(self, path: str | PathLike[str]) -> NoReturn:
        """Raise UsageError: the page was removed."""
        hint = 'seen.to_png("watch.png"), seen.to_csv("watch.csv"), or seen.to_trace("watch.trace.json") for ui.perfetto.dev'
        raise UsageError(f"{path}: a watch no longer writes HTML", hint=hint)

    def began(self, what: str, model: str, size: SizeOfCall) -> Watched:
        """Take the beginning of a watched call."""
        return self._open(what, "call", model, size)

    def sample(self, now_s: float, values: Bytes) -> None:
        """Take what the counters showed at this moment."""
        with self._lock:
            if self._entered:
                self._measured.take(values, now_s)
                for watched in self._under_way:
                    watched.take(values)

    def renew_lock(self) -> None:
        """Make a lock that nobody holds, in a fork of this process."""
        self._lock = threading.RLock()

    def read(self, values: Bytes) -> None:
        """Take what the counters show now."""
        with self._lock:
            self._measured.take(values, time.monotonic())

    def keep(self, watched: Watched, ended: EndedCall) -> None:
        """Take a call that ended."""
        with self._lock:
            self._under_way.remove(watched)
            self._rows.add(ended)

    def _open(self, what: str, kind: str, model: str, size: SizeOfCall) -> Watched:
        watched = Watched(self, what, kind, model, size)
        with self._lock:
            self._under_way.append(watched)
        return watched

    def row(self, what: object, kind: str) -> AbstractContextManager[object]:
        """Return what gives a row to the block that it is entered for; outside the watch, nothing."""
        if not self._entered:
            without_mistake(self._outside.tell, kind, what)
            return contextlib.nullcontext()
        return Told(functools.partial(self._open, str(what), kind, "", NO_SIZE))

    def _begin(self) -> None:
        sampler.add(self)
        self._measured.begin()

    def _mark(self, label: str) -> None:
        self.read(readings.now())
        with self._lock:
            if len(self._marks) < _MOST_MARKS:
                self._marks.append(Mark(time.monotonic() - self.began_s, label))


@overload
def watch(function: F, /) -> F: ...
@overload
def watch(function: None = None, /, *, sample_every_s: float = DEFAULT_SAMPLE_EVERY_S) -> Watch: ...
def watch(function: Callable[..., Any] | None = None, /, *, sample_every_s: float = DEFAULT_SAMPLE_EVERY_S) -> Any:
    """Watch memory in a block (``with watch() as seen``) or in every call of a function (``@watch``, ``@watch(...)``).

    For each device that torch works on: allocated and reserved, their peaks exact; NVML's figures for all processes, this one and
    the others; the simulated device of ``oomguard.testing``; the host's memory of this process. Every engine call inside
    (``generate``, a model's forward pass, vLLM's ``LLM.generate``) is a row. A decorated function has what was seen of all its
    calls as ``function.seen``.

    Args:
        sample_every_s: seconds between two samples, which a thread takes: for the plot, and for what has no peak of its own.

    Raises:
        SettingError: not a time.
        UsageError: what is watched is no function (a class, a number).

    The body runs and raises as without it. CUDA's own peak (``torch.cuda.max_memory_allocated``) begins anew with the watch and with each
    call in it.
    """
    is_number = isinstance(sample_every_s, (int, float)) and not isinstance(sample_every_s, bool)
    if not is_number or not 0 < sample_every_s < math.inf:
        raise SettingError(f"sample_every_s={sample_every_s!r}", hint="a number of seconds above 0")
    made = Watch(sample_every_s=sample_every_s)
    return made if function is None else made(function)
