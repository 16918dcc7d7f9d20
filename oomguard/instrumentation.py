"""Watch memory before, at the peak and after a block or a function, with ``oomguard.watch``.

It does not change what the body does or raises.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    NamedTuple,
    NoReturn,
    Protocol,
    TypeVar,
    cast,
    overload,
)

from oomguard.core import records
from oomguard.core.errors import SettingError, UsageError
from oomguard.core.files import write_whole
from oomguard.core.incident import Attempt
from oomguard.core.measurements import (
    ALLOCATED,
    HOST,
    IN_USE,
    OTHERS,
    OWN,
    RESERVED,
    RESIDENT,
    Counter,
    Mark,
    MemoryUse,
    Sample,
    SeenCall,
    TimedAttempt,
    Timeline,
)
from oomguard.core.process import disabled
from oomguard.engines.protocol import SizeOfCall
from oomguard.engines.registry import watch_seen_calls
from oomguard.guarding.intercept import (
    NO_SIZE,
    ObservedBlock,
    enter_around,
    is_special,
    observers,
    observing,
    shown,
    without_mistake,
)
from oomguard.guarding.intercept import watch as watch_calls
from oomguard.probe import torch_memory
from oomguard.probe.host import Resident, peak_resident_bytes, resident_bytes
from oomguard.probe.nvml import Device, Session, sees_host_pids
from oomguard.probe.torch_memory import Peaks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Bytes = dict[Counter, int]
_RESIDENT: Final = Counter(HOST, RESIDENT)


class Readings:
    """Read the counters; NVML and a kernel file stay open between ``begin`` and ``end``."""

    def __init__(self) -> None:
        self._nvml: Session | None = None
        self._resident: Resident | None = None
        self._knows_pids = False
        self._is_own: dict[int, bool] = {}

    def begin(self) -> None:
        """Open NVML and the kernel file, if they exist."""
        self._resident = Resident()
        self._nvml = Session.begin()
        # NVML reports process ids of the host, which mean other processes in a container.
        self._knows_pids = self._nvml is not None and bool(sees_host_pids())

    def end(self) -> None:
        """Close NVML and the kernel file."""
        self.forget_files()
        if self._nvml is not None:
            self._nvml.end()
            self._nvml = None

    def forget_files(self) -> None:
        """Close the kernel file in a forked child, because it describes the parent."""
        resident = self._resident
        self._resident = None
        if resident is not None:
            resident.end()

    def now(self) -> Bytes:
        """Return the values of all counters."""
        return self._with_others(torch_memory.now())

    def of_call(self) -> Bytes:
        """Return the counters for one call: torch's, or without torch NVML's and the host's."""
        found = torch_memory.now()
        # torch's counters are exact and cheap. A read of NVML takes longer than many a call.
        return found or self._with_others(found)

    def limits(self) -> Bytes:
        """Return the total memory of each device."""
        found = torch_memory.limits()
        if self._nvml is not None:
            names = self._names(found)
            for device in self._nvml.devices():
                if device.total_bytes is not None and device.index in names:
                    found[Counter(names[device.index], IN_USE)] = device.total_bytes
        return found

    def _with_others(self, found: Bytes) -> Bytes:
        """Add NVML's and the host's counters to torch's."""
        if self._nvml is not None:
            found |= self._of_nvml(found)
        kept = self._resident
        if kept is None:
            resident = resident_bytes()
        else:
            resident = kept.bytes()
        if resident is not None:
            found[_RESIDENT] = resident
        return found

    def _of_nvml(self, of_torch: Bytes) -> Bytes:
        found: Bytes = {}
        if self._nvml is None:
            return found
        names = self._names(of_torch)
        for device in self._nvml.devices():
            if device.index in names:
                for what, size in self._shares(device).items():
                    found[Counter(names[device.index], what)] = size
        return found

    def _names(self, of_torch: Bytes) -> dict[int, str]:
        """Return a name for each NVML device in use by torch, or for all without torch."""
        assert self._nvml is not None  # noqa: S101 - asked only while it is open
        uuids = self._nvml.uuids
        # torch has counters only of the devices that this program has used.
        used = set()
        for key in of_torch:
            if key.what == ALLOCATED and key.device.startswith("cuda:"):
                used.add(key.device)
        worked_on = sorted(used)
        if not worked_on:
            # Without torch, any device may be the program's.
            return {index: f"GPU {index}" for index in uuids}
        names: dict[int, str] = {}
        # Some versions of torch do not report the identity of a device.
        with contextlib.suppress(Exception):
            cuda = sys.modules["torch"].cuda
            for name in worked_on:
                own = str(cuda.get_device_properties(int(name.removeprefix("cuda:"))).uuid)
                for index, uuid in uuids.items():
                    if uuid and uuid.endswith(own):
                        names[index] = name
        return names

    def _shares(self, device: Device) -> dict[str, int]:
        """Return a device's memory in use: of all processes, of this one, and of the others.

        The last two are left out if NVML does not report them.
        """
        if device.total_bytes is None or device.free_bytes is None:
            return {}
        used = device.total_bytes - device.free_bytes
        found = {IN_USE: used}
        by_pid = device.used_bytes_by_pid
        if self._knows_pids and by_pid is not None:
            own = []
            for pid, size in by_pid.items():
                if self._belongs_here(pid):
                    own.append(size)
            # NVML hides the bytes of a process in some containers; then no share is known.
            if None not in own:
                found[OWN] = sum(size for size in own if size is not None)
                found[OTHERS] = max(0, used - found[OWN])
        return found

    def _belongs_here(self, pid: int) -> bool:
        """Return whether a process is this one or its descendant, such as an engine core."""
        if pid not in self._is_own:
            import psutil

            # A process that has ended meanwhile cannot be ours any more.
            self._is_own[pid] = False
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                line = [pid, *(parent.pid for parent in psutil.Process(pid).parents())]
                self._is_own[pid] = os.getpid() in line
        return self._is_own[pid]


# The samples of one watch: all at first, then fewer, each with the peak of its interval.

MOST_SAMPLES: Final = 8192


class Samples:
    """Hold samples in order of time; whenever they are too many, the interval doubles."""

    def __init__(self, most: int = MOST_SAMPLES) -> None:
        self._most = most
        self._samples: list[Sample] = []
        self._together = 1
        self._waiting: list[Sample] = []

    def add(self, seconds: float, values: Bytes) -> None:
        """Add a sample."""
        sample = Sample(seconds, values)
        if self._together == 1:
            self._samples.append(sample)
        else:
            self._wait(sample)
        if len(self._samples) > self._most:
            # Merge in pairs and keep the peak of each, so that no peak is lost when samples become
            # fewer.
            pairs = range(0, len(self._samples), 2)
            self._samples = [_most(self._samples[i : i + 2]) for i in pairs]
            self._together *= 2

    def _wait(self, sample: Sample) -> None:
        self._waiting.append(sample)
        if len(self._waiting) >= self._together:
            self._samples.append(_most(self._waiting))
            self._waiting.clear()

    def all(self) -> tuple[Sample, ...]:
        """Return all samples."""
        return tuple(sorted((*self._samples, *self._waiting), key=lambda sample: sample.seconds))


def _most(samples: list[Sample]) -> Sample:
    """Merge samples into one, with the last one's time and the peak of each counter."""
    if len(samples) == 1:
        return samples[0]
    values: Bytes = {}
    for sample in samples:
        for key, value in sample.bytes.items():
            values[key] = max(value, values.get(key, 0))
    return Sample(samples[-1].seconds, values)


def most(*sizes: int | None) -> int | None:
    """Return the largest known size, or None if none is known."""
    found = []
    for size in sizes:
        if size is not None:
            found.append(size)
    return max(found, default=None)


def uses_of(
    before: Mapping[Counter, int],
    peaks: Mapping[Counter, int],
    after: Mapping[Counter, int],
    limits: Mapping[Counter, int],
) -> tuple[MemoryUse, ...]:
    """Return every counter's use: before, peak and after. Only torch's peak is exact."""
    found = []
    for key in dict.fromkeys([*before, *peaks, *after]):
        found.append(
            MemoryUse(
                key.device,
                key.what,
                before.get(key),
                most(before.get(key), peaks.get(key), after.get(key)),
                after.get(key),
                limits.get(key),
                sampled=key.what not in {ALLOCATED, RESERVED},
            )
        )
    return tuple(found)


readings: Final = Readings()
_STAYS_S: Final = 1.0
# A lock accepts no longer timeout than threading.TIMEOUT_MAX.
_LONGEST_WAIT_S: Final = 3600.0


class SampleReceiver(Protocol):
    """Define an object that receives samples."""

    sample_every_s: float

    def sample(self, now_s: float, values: Bytes) -> None:
        """Take the values of the counters at a time of ``time.monotonic``."""

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, where no thread would ever release it."""


class _Sampler:
    """Run the sampling thread; ``readings`` is open while there is any receiver."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all receivers in a forked child, where the thread does not exist."""
        self._lock = threading.Lock()
        self._due: dict[SampleReceiver, float] = {}
        self._thread: threading.Thread | None = None
        # The thread waits for this lock, which is locked while there is no news. Each thread has
        # its own.
        self._news = threading.Lock()
        self._waits_until_s = 0.0

    def everyone(self) -> tuple[SampleReceiver, ...]:
        """Return all receivers."""
        return tuple(self._due)

    def add(self, sampled: SampleReceiver) -> None:
        """Add a receiver; start the thread for the first one."""
        with self._lock:
            self._due[sampled] = due_s = time.monotonic() + sampled.sample_every_s
            if self._thread is None:
                readings.begin()
                self._news = threading.Lock()
                self._news.acquire()
                self._thread = threading.Thread(
                    target=self._run, args=(self._news,), name="oomguard-watch", daemon=True
                )
                self._thread.start()
            elif due_s < self._waits_until_s:
                self._wake()

    def remove(self, sampled: SampleReceiver, *, stays: bool = False) -> threading.Thread | None:
        """Remove a receiver.

        With the last one, return the thread, which ends now, or a moment later if it ``stays``.
        """
        with self._lock:
            self._due.pop(sampled, None)
            if self._due or stays or self._thread is None:
                return None
            thread = self._thread
            self._close()
            self._wake()
        return thread

    def _wake(self) -> None:
        """Wake the thread. The caller must hold the lock."""
        if self._news.locked():
            self._news.release()

    def _close(self) -> None:
        self._thread = None
        readings.end()

    def _run(self, news: threading.Lock) -> None:
        me = threading.current_thread()
        wait_s = 0.0
        is_last_wait = False
        while True:
            # Use a plain lock, because a condition creates one at each wait. The thread must wake
            # up as rarely and briefly as possible.
            is_told = news.acquire(timeout=wait_s)
            values: Bytes = {}
            with self._lock:
                if self._thread is not me:
                    return
                if is_last_wait and not is_told and not self._due:
                    self._close()
                    return
                now_s = time.monotonic()
                due = []
                for sampled, at_s in self._due.items():
                    if at_s <= now_s:
                        due.append(sampled)
                for sampled in due:
                    self._due[sampled] = now_s + sampled.sample_every_s
                if due:
                    with contextlib.suppress(Exception):
                        # A lost device costs this sample, not the user's work.
                        values = readings.now()
                is_last_wait = not self._due
                self._waits_until_s = min(self._due.values(), default=now_s + _STAYS_S)
                wait_s = min(max(0.0, self._waits_until_s - now_s), _LONGEST_WAIT_S)
            for sampled in due:
                with contextlib.suppress(Exception):
                    sampled.sample(now_s, values)


sampler = _Sampler()


def _renew() -> None:
    """Reset the thread and all locks in a forked child."""
    for sampled in sampler.everyone():
        sampled.renew_lock()
    readings.forget_files()
    sampler.begin_anew()


os.register_at_fork(after_in_child=_renew)


# The counters over a whole watch: before it, at the peak, after it, and samples in between.


class WatchMeasurement:
    """Measure a watch over all its entries; "before" is before the first entry."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self.ended_s: float | None = None
        self.limits: Bytes = {}
        self.samples = Samples()
        self._before: Bytes = {}
        self._most: Bytes = {}
        self._after: Bytes = {}
        self._peaks: Peaks | None = None
        self._limits_asked_of: set[Counter] = {_RESIDENT}
        self._resident_before: int | None = None
        self._is_resident_exact = False

    def begin(self) -> None:
        """Begin or continue."""
        values = readings.now()
        now_s = time.monotonic()
        if self.ended_s is None:
            self._before = values
            self.began_s = now_s
        self._ask_limits_of(values)
        self._resident_before = peak_resident_bytes()
        self._peaks = Peaks()
        self.take(values, now_s)

    def end(self) -> None:
        """End for now."""
        self._after = readings.now()
        self.ended_s = time.monotonic()
        self.take(self._after, self.ended_s)
        if self._peaks is not None:
            self._rise_to(self._peaks.end())
            self._peaks = None
        peak = peak_resident_bytes()
        before = self._resident_before
        # The kernel keeps one peak for the whole process. It is the watch's peak if it rose during
        # the watch.
        self._is_resident_exact = peak is not None and before is not None and peak > before
        if peak is not None and self._is_resident_exact:
            self._rise_to({_RESIDENT: peak})

    def take(self, values: Bytes, now_s: float) -> None:
        """Take the values of the counters at a time of ``time.monotonic``."""
        self._rise_to(values)
        if self._peaks is not None:
            self._peaks.follow()
        self.samples.add(now_s - self.began_s, values)
        # once for each counter, because some have no value
        if not self._limits_asked_of.issuperset(values):
            self._ask_limits_of(values)

    def uses(self) -> tuple[MemoryUse, ...]:
        """Return every counter's use, up to now if the watch is active."""
        if self._peaks is not None:
            self._after = readings.now()
            self.take(self._after, time.monotonic())
            self._rise_to(self._peaks.so_far())
        found = []
        for use in uses_of(self._before, self._most, self._after, self.limits):
            is_exact = use.what == RESIDENT and self._is_resident_exact
            found.append(replace(use, sampled=use.sampled and not is_exact))
        return tuple(found)

    def _ask_limits_of(self, values: Bytes) -> None:
        # Make a new dictionary: finished rows keep the old one.
        self.limits = self.limits | readings.limits()
        self._limits_asked_of.update(values)

    def _rise_to(self, values: Bytes) -> None:
        most = self._most
        for key, value in values.items():
            if value > most.get(key, -1):
                most[key] = value


# Spans and marks outside their watch are not recorded, so they cause a warning.


class InactiveUseWarnings:
    """Warn once about a span and once about a mark, because a loop may make a million."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn(self, kind: str, label: object) -> None:
        """Log a warning; the user's work continues."""
        if kind in self._warned or disabled():
            return
        self._warned.add(kind)
        from oomguard.core.log import get_logger

        hint = (
            "make it inside with oomguard.watch() as seen:, or enter the watch again (with "
            f"seen:). oomguard warns about a {kind} only once"
        )
        get_logger().warning(
            f"a {kind} is not recorded because its watch is not active",
            label=records.shown(str(label)),
            hint=hint,
        )


# A user's file is written completely, or stays as it was.

# /dev/stdout may be a file that others write too.
_OPEN_FILES: Final = {
    Path("/dev"),
    Path("/proc"),
}
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OTHER_PICTURES: Final = {
    ".pdf",
    ".svg",
    ".jpg",
    ".jpeg",
    ".gif",
    ".webp",
    ".tif",
    ".tiff",
    ".bmp",
    ".eps",
    ".html",
}


def refuse_other_format(path: str | PathLike[str]) -> None:
    """Raise UsageError if a PNG's name has another format's suffix."""
    suffix = Path(path).suffix.lower()
    if suffix in _OTHER_PICTURES:
        raise UsageError(
            f"{path}: to_png writes PNG, but {suffix} is another format",
            hint=(
                f"name it {Path(path).with_suffix('.png')}; for other formats use "
                "seen.plot().savefig(path)"
            ),
        )


def write(path: str | PathLike[str], content: bytes) -> None:
    """Write a file in an existing folder; write to a pipe or a device directly.

    Raises:
        UsageError: the file cannot be written. Its old content is unchanged.
    """
    named = Path(path)
    try:
        if (named.exists() and not named.is_file()) or _OPEN_FILES & {*named.absolute().parents}:
            with named.open("ab") as file:
                file.write(content)
            return
        # Write to a link's target, so that the link stays a link.
        target = named.resolve()
        if not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        write_whole(target, content)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint=_hint(error, len(content))
        ) from None


def _hint(error: OSError, size_bytes: int) -> str:
    if error.errno in _NO_ROOM:
        return (
            f"free {size_bytes:,} bytes, or name a file on another disk; the old file is unchanged"
        )
    if isinstance(error, PermissionError):
        return "name a file in a folder that you can write"
    return "name a file in a folder that exists"


# A span is a block or a function that gets its own row in a watch.


class Span:
    """Record a row for one block, or for each call of the decorated function."""

    def __init__(self, watch: Watch, label: object) -> None:
        self._watch = watch
        self._label = label
        self._row: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        if self._row is not None:
            raise UsageError(
                f"the span {str(self._label)!r} was already used",
                hint="create a new one for each block: with seen.span(label): (labels may repeat)",
            )
        self._row = self._watch.row(self._label, "span")
        self._row.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._row is not None:
            self._row.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Record a row for each call of a plain function."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with Span(self._watch, self._label):
                return function(*args, **kwargs)

        return cast("F", call)


# As a decorator, a watch records calls of plain and coroutine functions as rows, and each step of a
# generator.


def decorate(watch: Watch, function: F) -> F:
    """Return the function under a watch; raise UsageError if it is not a function."""
    if isinstance(function, type) or not callable(function):
        if isinstance(function, type):
            what = f"the class {function.__name__}"
        else:
            what = repr(function)
        hint = "watch a function, a method, or a block: with oomguard.watch() as seen: ..."
        raise UsageError(f"watch expects a function, not {what}", hint=hint)
    name = _name(function)
    runs = _runs(function)
    if inspect.iscoroutinefunction(runs):
        decorated = _coroutine(watch, runs, name)
    else:
        decorated = enter_around(runs, _Steps(watch)) or _plain(watch, runs, name)
    decorated.seen = watch  # type: ignore[attr-defined]
    return cast("F", decorated)


class _Steps:
    """Enter the watch for each step of a generator.

    The next step follows soon, so the sampling thread stays.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._watch.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.leave(kind, stays=True)


def _runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that shows whether calls are coroutines or generators.

    For an object it is the method ``__call__``.
    """
    if inspect.isroutine(function) or isinstance(function, functools.partial):
        return function
    # look for the method itself, because everything callable has an attribute of this name
    method = getattr(function, "__call__", function)  # noqa: B004
    if is_special(method):
        return method
    return function


def _name(function: Callable[..., Any]) -> str:
    """Return the name of a row: of a function, of a partial's function, or of an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None)
    if isinstance(name, str):
        return name
    return type(function).__qualname__


def _plain(watch: Watch, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with watch, watch.row(name, "function"):
            return function(*args, **kwargs)

    return call


def _coroutine(watch: Watch, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with watch, watch.row(name, "function"):
            return await function(*args, **kwargs)

    return coroutine


# A call's end records only the values. The row is made later, so that the next call need not wait.


class EndedCall(NamedTuple):
    """Hold the values of a finished call; ``began_s`` counts from the watch's start."""

    what: str
    kind: str
    began_s: float
    seconds: float
    model: str
    size: SizeOfCall
    before: Bytes
    peaks: Bytes
    after: Bytes
    limits: Bytes
    attempts: tuple[TimedAttempt, ...]
    error: str

    def row(self) -> SeenCall:
        """Return the row of the call."""
        return SeenCall(
            self.what,
            self.kind,
            self.began_s,
            self.seconds,
            self.model,
            *self.size,
            uses=uses_of(self.before, self.peaks, self.after, self.limits),
            attempts=self.attempts,
            error=self.error,
        )


# Measure one running call or span for one watch: before, peak and after.


class RowOwner(Protocol):
    """Define the watch that a row belongs to."""

    @property
    def began_s(self) -> float:
        """When the watch began, on the clock of ``time.monotonic``."""

    @property
    def limits(self) -> Bytes:
        """The total memory of each device, as far as known."""

    def read(self, values: Bytes) -> None:
        """Read the counters at the start or end of a call."""

    def keep(self, watched: CallMeasurement, ended: EndedCall) -> None:
        """Record a finished call."""


class CallMeasurement:
    """Measure a call from its start to its end."""

    def __init__(
        self, keeper: RowOwner, what: str, kind: str, model: str, size: SizeOfCall
    ) -> None:
        self._keeper = keeper
        self._what = what
        self._kind = kind
        self._model = model
        self._size = size
        self._attempts: list[TimedAttempt] = []
        self._before = readings.of_call()
        keeper.read(self._before)
        self._peaks = Peaks()
        self._began_s = self._attempt_began_s = time.monotonic()

    def take(self, values: Bytes) -> None:
        """Take a sample of the counters for this call."""
        known = {}
        for key, value in values.items():
            if key in self._before:
                known[key] = value
        self._peaks.take(known)

    def attempted(self, attempt: Attempt) -> None:
        """Record a guard's attempt, which began after the last one was diagnosed."""
        began_s = self._attempt_began_s - self._keeper.began_s
        self._attempts.append(TimedAttempt(attempt, began_s, began_s + attempt.seconds))
        self._attempt_began_s = time.monotonic()

    def ended(self, error: BaseException | None) -> None:
        """Record the end of the call, and the exception if it raised one."""
        seconds = time.monotonic() - self._began_s
        after = readings.of_call()
        self._peaks.take(after)
        self._keeper.read(after)
        ended = EndedCall(
            self._what,
            self._kind,
            self._began_s - self._keeper.began_s,
            seconds,
            self._model,
            self._size,
            self._before,
            self._peaks.end(),
            after,
            torch_memory.simulated_limits() or self._keeper.limits,
            tuple(self._attempts),
            "" if error is None else type(error).__name__,
        )
        self._keeper.keep(self, ended)


# A watch keeps the first calls as rows and adds up later ones by name, so that a long run fits.

MOST_ROWS: Final = 10_000
_MADE_AT_ONCE: Final = 64


class Rows:
    """Hold rows in the order of their start.

    A row that failed or needed several attempts is always kept separately.
    """

    def __init__(self) -> None:
        self._rows: list[SeenCall] = []
        self._ended: list[EndedCall] = []
        self._added_up: dict[tuple[str, str, str], SeenCall] = {}

    def add(self, call: EndedCall) -> None:
        """Add a finished call."""
        self._ended.append(call)
        if len(self._ended) >= _MADE_AT_ONCE:
            self._make()

    def _make(self) -> None:
        for call in self._ended:
            self._take(call.row())
        self._ended.clear()

    def _take(self, row: SeenCall) -> None:
        if len(self._rows) < MOST_ROWS or row.error or len(row.attempts) > 1:
            self._rows.append(row)
            return
        key = row.what, row.kind, row.model
        if key in self._added_up:
            self._added_up[key] = _sum(self._added_up[key], row)
        else:
            self._added_up[key] = row

    def all(self) -> tuple[SeenCall, ...]:
        """Return all rows; the added-up ones come last."""
        self._make()
        return (*sorted(self._rows, key=lambda row: row.began_s), *self._added_up.values())


def _sum(sum_of_rows: SeenCall, row: SeenCall) -> SeenCall:
    later = {(use.device, use.what): use for use in row.uses}
    uses = []
    for use in sum_of_rows.uses:
        other = later.get((use.device, use.what))
        if other is None:
            uses.append(use)
        else:
            peak_bytes = most(use.peak_bytes, other.peak_bytes)
            uses.append(replace(use, peak_bytes=peak_bytes, after_bytes=other.after_bytes))
    return replace(
        sum_of_rows,
        seconds=sum_of_rows.seconds + row.seconds,
        rows=_plus(sum_of_rows.rows, row.rows),
        prompt_tokens=_plus(sum_of_rows.prompt_tokens, row.prompt_tokens),
        max_new_tokens=None,
        uses=tuple(uses),
        attempts=(),
        calls=sum_of_rows.calls + row.calls,
    )


def _plus(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return None
    return one + other


F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_SAMPLE_EVERY_S: Final = 0.1
_MOST_MARKS: Final = 10_000
_OFF: Final = "OOMGUARD_DISABLE is set, so oomguard watches nothing"


class Watch:
    """Record what one ``oomguard.watch`` sees; ``print`` shows it as a table.

    ```python
    with oomguard.watch() as seen:
        llm.generate(prompts)
    print(seen)
    ```

    Attributes:
        sample_every_s: the interval of samples in seconds.
    """

    def __init__(self, *, sample_every_s: float = DEFAULT_SAMPLE_EVERY_S) -> None:
        self.sample_every_s = sample_every_s
        self._lock = threading.RLock()
        self._entered = 0
        self._error = ""
        self._measured = WatchMeasurement()
        self._rows = Rows()
        self._marks: list[Mark] = []
        self._under_way: list[CallMeasurement] = []
        self._outside = InactiveUseWarnings()

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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave(kind)

    def leave(self, kind: type[BaseException] | None = None, *, stays: bool = False) -> None:
        """Leave the watch; the last exit ends it.

        Args:
            kind: the type of the raised exception, or None.
            stays: whether the sampling thread stays for a moment, because the watch is entered
                again soon.
        """
        with self._lock:
            if not self._entered:
                return
            self._entered -= 1
            if kind is None:
                self._error = ""
            else:
                self._error = kind.__name__
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
        """Watch every call of a function, generator or method, sync or async.

        The function's attribute ``seen`` is this watch.
        """
        return decorate(self, function)

    def __repr__(self) -> str:
        return f"<oomguard.Watch: calls and spans: {sum(row.calls for row in self.rows):,}>"

    def __str__(self) -> str:
        from oomguard.report.timeline import table_text

        return table_text(self.timeline)

    def _repr_png_(self) -> bytes | None:
        """Return the plot for a notebook cell, or None if matplotlib is not installed."""
        from oomguard.report.timeline import png

        try:
            return png(self.timeline)
        except UsageError:
            return None

    @property
    def began_s(self) -> float:
        """When the watch was first entered, on the clock of ``time.monotonic``."""
        return self._measured.began_s

    @property
    def limits(self) -> Bytes:
        """The total memory of each device, as far as known."""
        return self._measured.limits

    @property
    def timeline(self) -> Timeline:
        """Everything recorded so far, as one record."""
        with self._lock:
            uses = self._measured.uses()
            measured = self._measured
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
        """Every finished call and span in the order of their start."""
        with self._lock:
            return self._rows.all()

    @property
    def uses(self) -> tuple[MemoryUse, ...]:
        """Every counter of every device: before the watch, at its peak, and after it or now."""
        with self._lock:
            return self._measured.uses()

    def mark(self, label: object) -> None:
        """Record a sample under a label, converted to text. Warns if the watch is not active."""
        if self._entered:
            without_mistake(self._mark, str(label))
        else:
            without_mistake(self._outside.warn, "mark", label)

    def span(self, label: object) -> Span:
        """Record a row for a phase of your own. Warns if the watch is not active.

        Args:
            label: any value, converted to text.
        """
        return Span(self, label)

    def table(self, *, most_rows: int = 20) -> Any:
        """Return the tables for a rich console: memory by counter, then the calls.

        Args:
            most_rows: the largest number of rows. If there are more calls, failed ones and those
                with the largest peaks are shown.
        """
        from oomguard.report.timeline import tables

        return tables(self.timeline, most_rows=most_rows)

    def to_csv(self, path: str | PathLike[str], *, samples: bool = False) -> None:
        """Write one CSV line for each row and counter, sizes in bytes.

        Args:
            path: the file.
            samples: write one line for each sample and counter instead.

        Raises:
            UsageError: the file cannot be written.
        """
        from oomguard.report.timeline import rows_csv, samples_csv

        write(path, (samples_csv if samples else rows_csv)(self.timeline).encode())

    def to_trace(self, path: str | PathLike[str]) -> None:
        """Write the timeline as Chrome trace JSON for ui.perfetto.dev.

        Raises:
            UsageError: the file cannot be written.
        """
        from oomguard.report.timeline import trace_json

        write(path, trace_json(self.timeline).encode())

    def plot(self) -> Figure:
        """Return the timeline as a matplotlib figure.

        Raises:
            UsageError: matplotlib is not installed.
        """
        from oomguard.report.timeline import figure

        return figure(self.timeline)

    def to_png(self, path: str | PathLike[str]) -> None:
        """Write the plot as PNG.

        Raises:
            UsageError: matplotlib is not installed, the name has another format's suffix, or the
                file cannot be written.
        """
        refuse_other_format(path)
        from oomguard.report.timeline import png

        write(path, png(self.timeline))

    def to_html(self, path: str | PathLike[str]) -> NoReturn:
        """Raise UsageError, because oomguard no longer writes HTML."""
        hint = (
            'seen.to_png("watch.png"), seen.to_csv("watch.csv"), or '
            'seen.to_trace("watch.trace.json") for ui.perfetto.dev'
        )
        raise UsageError(f"{path}: a watch no longer writes HTML", hint=hint)

    def began(self, what: str, model: str, size: SizeOfCall) -> CallMeasurement:
        """Record the start of a watched call."""
        return self._open(what, "call", model, size)

    def sample(self, now_s: float, values: Bytes) -> None:
        """Take the values of the counters at a time of ``time.monotonic``."""
        with self._lock:
            if self._entered:
                self._measured.take(values, now_s)
                for watched in self._under_way:
                    watched.take(values)

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, where no thread would ever release it."""
        self._lock = threading.RLock()

    def read(self, values: Bytes) -> None:
        """Read the counters now."""
        with self._lock:
            self._measured.take(values, time.monotonic())

    def keep(self, watched: CallMeasurement, ended: EndedCall) -> None:
        """Record a finished call."""
        with self._lock:
            self._under_way.remove(watched)
            self._rows.add(ended)

    def _open(self, what: str, kind: str, model: str, size: SizeOfCall) -> CallMeasurement:
        watched = CallMeasurement(self, what, kind, model, size)
        with self._lock:
            self._under_way.append(watched)
        return watched

    def row(self, what: object, kind: str) -> AbstractContextManager[object]:
        """Return a context that records its block as a row; outside the watch it does nothing."""
        if not self._entered:
            without_mistake(self._outside.warn, kind, what)
            return contextlib.nullcontext()
        return ObservedBlock(functools.partial(self._open, str(what), kind, "", NO_SIZE))

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
def watch(
    function: Callable[..., Any] | None = None, /, *, sample_every_s: float = DEFAULT_SAMPLE_EVERY_S
) -> Any:
    """Watch memory in a block, or as a decorator in each call of a function.

    ```python
    with oomguard.watch() as seen:
        llm.generate(prompts)
    print(seen)
    ```

    For each device that torch uses, the watch records allocated and reserved memory with exact
    peaks. It adds NVML's figures for all processes, this one and the others. It also records the
    simulated device of ``oomguard.testing`` and the host memory of this process. Each engine call
    inside is a row: ``generate``, a model's forward pass, vLLM's ``LLM.generate``. A decorated
    function has its watch as ``function.seen``.

    The body runs and raises as it would without the watch. CUDA's own peak
    (``torch.cuda.max_memory_allocated``) is reset at the start of the watch and of each call in it.

    Args:
        sample_every_s: the interval of samples in seconds. A thread takes them, for the plot and
            for counters without an exact peak.

    Raises:
        SettingError: ``sample_every_s`` is not a positive number.
        UsageError: the decorated object is not a function.
    """
    is_number = isinstance(sample_every_s, (int, float)) and not isinstance(sample_every_s, bool)
    if not is_number or not 0 < sample_every_s < math.inf:
        raise SettingError(
            f"sample_every_s={sample_every_s!r}", hint="give a number of seconds above 0"
        )
    made = Watch(sample_every_s=sample_every_s)
    if function is None:
        return made
    return made(function)
