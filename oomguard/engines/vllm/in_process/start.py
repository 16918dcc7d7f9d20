"""One start of vLLM in this process: attempted while its processes are heard, and again with other
arguments.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fcntl
import gc
import inspect
import os
import re
import select
import signal
import stat
import struct
import sys
import tempfile
import termios
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import WakeUpError
from oomguard.core.facts import Fact, FactValue, format_gib
from oomguard.core.incident import Incident, SettingInForce
from oomguard.core.log import get_logger
from oomguard.core.setting_spellings import surface
from oomguard.engines.command import Launch
from oomguard.engines.start_attempt import EndedStart, MadeAgain, MakeAgain
from oomguard.engines.vllm.environment import set_by_variable
from oomguard.engines.vllm.in_process import message_sender
from oomguard.engines.vllm.in_process.core_client import LastingClient, step_in_use
from oomguard.engines.vllm.in_process.core_restart import attend, may_attend
from oomguard.engines.vllm.in_process.message_receiver import (
    MessageReceiver,
    in_the_last_step,
    is_same,
    last_words,
    lines_of,
    segments_of,
)
from oomguard.engines.vllm.plugin import GROUP, LISTENER, fitting, is_plain
from oomguard.engines.vllm.plugin_messages import arguments_told, settings_of
from oomguard.probe.host import Cgroup, killed_for_memory, read_cgroup
from oomguard.probe.nvml import Device, devices
from oomguard.scan.effective_settings import ARGUMENTS

# Whose turn it is to start an engine: two that start at once on one device measure each other's
# memory.
#
# A lock of this user's on each device, held while a guarded start goes on, in every process. Not
# longer: an engine that was forked meanwhile holds the descriptor too, so the lock is given up and
# not only closed.

# Which devices a process sees, in the order in which the platforms ask.
_VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
_ALL: Final = "all"
# A model's weights may take minutes to load; a start that hangs is not to keep the others from
# theirs.
WAITS_S: Final = 900.0
_LOOKS_EVERY_S: Final = 0.2
# How often a lock is tried anew that somebody removes at the same time.
_TRIES: Final = 50


@contextlib.contextmanager
def turn(
    folder: Path | None = None,
    *,
    waits_s: float = WAITS_S,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Wait until no other guarded start goes on that sees one of these devices, and hold that while
    the block runs.

    Do without where no lock can be made. After ``waits_s`` seconds the start goes on all the same,
    and says so; once ``stop`` is true, at once.
    """
    held: list[_Lock] = []
    try:
        until_s = time.monotonic() + waits_s
        for name, kind in _locks(os.environ):
            place = _private(Path(tempfile.gettempdir()) if folder is None else folder)
            if place is None:
                lock = None
            else:
                lock = _Lock(place / name, kind)
            if lock is None or not lock.take(until_s, stop):
                break
            held.append(lock)
        yield
    finally:
        for lock in reversed(held):
            lock.give_up()


class _Lock:
    """A lock on a file that is there only while somebody holds it or waits for it."""

    def __init__(self, path: Path, kind: int) -> None:
        self._path = path
        self._kind = kind
        self._descriptor = -1

    def take(self, until_s: float, stop: Callable[[], bool]) -> bool:
        """Take it; return whether it is held: not where the file cannot be made, nor where the time
        is over or ``stop`` is true.
        """
        is_told = False
        while True:
            try:
                if self._is_taken():
                    return True
            except OSError:
                return False
            if stop():
                return False
            if time.monotonic() > until_s:
                get_logger().warning(
                    "another engine still starts", then="this one starts beside it"
                )
                return False
            if not is_told:
                get_logger().info(
                    "waiting for another engine to start",
                    because="two at once measure each other's memory",
                )
                is_told = True
            time.sleep(_LOOKS_EVERY_S)

    def _is_taken(self) -> bool:
        """Take it, unless somebody holds it; who held it before has removed the file that was
        locked. Raises OSError.
        """
        for _ in range(_TRIES):
            try:
                descriptor = os.open(
                    self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except FileNotFoundError:  # who gives a lock up removes the folder with it
                with contextlib.suppress(FileExistsError):
                    self._path.parent.mkdir(mode=0o700)
                continue
            try:
                fcntl.flock(descriptor, self._kind | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), self._path.stat()):
                    self._descriptor = descriptor
                    descriptor = -1
                    return True
            except BlockingIOError:
                return False
            except FileNotFoundError:
                continue
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        return False

    def give_up(self) -> None:
        """Remove the file where nobody else holds it, and unlock it: a fork of this process may
        hold the descriptor too.
        """
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path.unlink()
            self._path.parent.rmdir()
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def _locks(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return each lock and how it is held: those who see some devices exclude each other by device,
    and one who sees all excludes all.
    """
    named = next((value for name in _VARIABLES if (value := environ.get(name, "").strip())), "")
    devices = sorted({part.strip() for part in named.split(",") if part.strip()})
    if not devices:
        return [(f"{_ALL}.lock", fcntl.LOCK_EX)]
    return [
        (f"{_ALL}.lock", fcntl.LOCK_SH),
        *((f"{_file_name(device)}.lock", fcntl.LOCK_EX) for device in devices),
    ]


def _file_name(device: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in device)[:100]


def _private(folder: Path) -> Path | None:
    """Return a folder that only this user writes to; None where no such folder can be made."""
    place = folder / f"oomguard-starts-{os.geteuid()}"
    found = None
    for _ in range(_TRIES):  # who gives a lock up removes the folder with it
        try:
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)
            found = place.lstat()
            break
        except FileNotFoundError:
            continue
        except OSError:
            return None
    if found is None:
        return None
    is_ours = (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    )
    if is_ours:
        return place
    return None


# A start that will not end: a core that failed and waits for a worker that never hears it, or one
# that takes too long or is given up.
#
# vLLM's core asks its workers to end by a signal, which a worker can lose, and then waits for them
# without a limit; so does the front end for the core. Ended here are only the processes of this
# start, its workers first: then the core ends by itself.

LOOKS_EVERY_S: Final = 0.5
# vLLM's processes end within 5 seconds of a failure where nothing is lost.
ENDS_WITHIN_S: Final = 20.0
_CORE_FOLLOWS_WITHIN_S: Final = 5.0
GIVEN_UP: Final = "nobody waits for it any more, and it was ended"
# How vLLM names a core's process (vllm/v1/engine/utils.py CoreEngineProcManager, 0.10 to 0.32).
_CORE: Final = "EngineCore"


class StartupWatchdog:
    """A start that is watched while it lasts.

    Args:
        listener: hears the start's processes.
        within_s: the seconds that it may take; None: any.
        is_given_up: whether nobody waits for it any more.

    Attributes:
        ended_because: why it was ended before it had started; None where it was not.
    """

    def __init__(
        self,
        listener: MessageReceiver,
        within_s: float | None,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._listener = listener
        self._within_s = within_s
        self._is_given_up = is_given_up
        self._before = set(active_children())
        self._over = threading.Event()
        self._began_s = time.monotonic()
        self.ended_because: str | None = None

    @contextlib.contextmanager
    def lasting(self) -> Iterator[StartupWatchdog]:
        """Watch in a thread until the block ends."""
        thread = threading.Thread(target=self._watch, name="oomguard-start-watch", daemon=True)
        with contextlib.suppress(
            RuntimeError
        ):  # no more threads can be started: then it is not watched
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            if thread.ident is not None:
                thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOKS_EVERY_S):
            now_s = time.monotonic()
            failed = self._listener.failed
            stuck = {
                pid
                for pid, at_s in failed.items()
                if now_s - at_s > ENDS_WITHIN_S and self._is_alive(pid)
            }
            late = self._within_s is not None and now_s - self._began_s > self._within_s
            if stuck:
                get_logger().warning("the engine failed and does not end", processes=sorted(stuck))
                self._end_all(spared=stuck)
                return
            if self.ended_because is None and (late or self._is_given_up()):
                too_long = f"it had not started within {self._within_s or 0:g} s, and was ended"
                if late:
                    self.ended_because = too_long
                else:
                    self.ended_because = GIVEN_UP
                get_logger().warning("the engine's start is ended", because=self.ended_because)
            if (
                self.ended_because is not None
            ):  # each time: one that is killed may have begun another
                self._end_all(spared=set())

    def _end_all(self, spared: set[int]) -> None:
        """Kill the start's processes; those ``spared`` only where they do not follow."""
        self._kill(set(self._listener.speakers) - spared)
        for process in self._new_cores():
            if process.pid not in spared:
                with contextlib.suppress(ValueError):  # closed meanwhile
                    process.kill()
        until_s = time.monotonic() + _CORE_FOLLOWS_WITHIN_S
        while (
            any(map(self._is_alive, spared))
            and time.monotonic() < until_s
            and not self._over.wait(0.05)
        ):
            pass
        self._kill(set(self._listener.speakers))

    def _new_cores(self) -> list[BaseProcess]:
        """Return the cores that were begun since: one says its first word seconds later, once it
        has imported the engine.
        """
        with contextlib.suppress(RuntimeError):  # another thread has just begun a process
            return [
                p for p in active_children() if p not in self._before and p.name.startswith(_CORE)
            ]
        return []

    def _kill(self, pids: set[int]) -> None:
        for pid in filter(self._is_alive, pids):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _is_alive(self, pid: int) -> bool:
        return is_same(pid, self._listener.speakers.get(pid))


# The arguments of one start: what the program gave, and a copy of them with settings changed.
#
# The program's own object goes into the first attempt and is left alone afterwards: vLLM writes
# into it while it starts.

_ENGINE: Final = "vllm"
_NAME: Final = "engine_args"


class StartArguments:
    """The arguments of one call that starts an engine.

    Args:
        function: the call's function; it tells which argument holds those of the engine.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._args = args
        self._kwargs = dict(kwargs)
        self._position = _position(function, args, kwargs)
        given = self._given()
        self._is_known = dataclasses.is_dataclass(given) and not isinstance(given, type)
        if self._is_known:
            self._first = _copied(given)
        else:
            self._first = None
        self.version = _version()

    def call(self, changed: Mapping[str, FactValue]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments: the program's own, where nothing is changed.

        Raises:
            TypeError: a value does not fit its argument.
        """
        if not changed:
            return self._args, self._kwargs
        arguments = _copied(self._first)
        for name, value in changed.items():
            own = surface(name, _ENGINE, self.version)
            if own.kwarg is not None:
                spelled = own.to_engine(value)
                setattr(arguments, own.kwarg, fitting(getattr(arguments, own.kwarg), spelled))
        if isinstance(self._position, int):
            before = self._args[: self._position]
            behind = self._args[self._position + 1 :]
            return (*before, arguments, *behind), dict(self._kwargs)
        return self._args, {**self._kwargs, _NAME: arguments}

    def settings_in_force(self) -> dict[str, SettingInForce]:
        """Return what differs from the engine's defaults, as canonical settings; empty where the
        call has no arguments to read.
        """
        if not self._is_known:
            return {}
        names = set(arguments_told())
        told = {
            f.name: value
            for f in dataclasses.fields(self._first)
            if f.name in names
            and is_plain(value := getattr(self._first, f.name))
            and value != f.default
        }
        model = getattr(self._first, "model", None)
        if isinstance(model, str):
            found = {"model": model}
        else:
            found = {}
        known: dict[str, FactValue] = {**found, **settings_of(told)}
        return {name: SettingInForce(name, value, True, ARGUMENTS) for name, value in known.items()}

    def carries(self, name: str) -> bool:
        """Return whether the engine's arguments have a field for a setting."""
        own = surface(name, _ENGINE, self.version)
        return self._is_known and own.kwarg in {f.name for f in dataclasses.fields(self._first)}

    def beaten_by(self, name: str, facts: Mapping[str, Fact]) -> SettingInForce | None:
        """Return the variable that sets a setting over the argument; None where none does."""
        return set_by_variable(Launch((sys.executable,)), name, facts, os.environ)

    def _given(self) -> Any:
        if isinstance(self._position, int):
            return self._args[self._position]
        return self._kwargs.get(_NAME)


def _position(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int | None:
    """Return where the engine's arguments stand among the positional ones; None where
    they do not.
    """
    if _NAME in kwargs:
        return None
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    if _NAME in names:
        place = names.index(_NAME)
    else:
        place = None
    if place is not None and place < len(args):
        return place
    return None


def _copied(arguments: Any) -> Any:
    """Return a copy that vLLM may write into; a field that cannot be copied is shared."""
    made = copy.copy(arguments)
    for one in dataclasses.fields(arguments):
        value = getattr(arguments, one.name)
        if is_plain(value) or value is None:
            continue
        with contextlib.suppress(
            Exception
        ):  # whatever an object of the program's raises: it stays as it is
            setattr(made, one.name, copy.deepcopy(value))
    return made


def _version() -> str | None:
    """Return the version of the vLLM that is loaded, without its local part; None where it tells
    none.
    """
    found = getattr(sys.modules.get("vllm"), "__version__", None)
    if isinstance(found, str) and found[:1].isdigit():
        return found.partition("+")[0]
    return None


# What a failed start left: the processes that spoke as its engine's, and the shared memory that
# they said they made.
#
# Only those. A process of the user's that was started in the same seconds is not touched, and
# neither is a file in /dev/shm that nobody named.

FOLDER: Final = Path("/dev/shm")  # noqa: S108 - where Python puts it
# How the C library names the file of a semaphore there.
_SEMAPHORE: Final = "sem."
# vLLM ends its own processes; this is for those that it leaves.
_ENDS_BY_ITSELF_S: Final = 5.0
_ENDS_AFTER_TERM_S: Final = 3.0
_GONE_AFTER_KILL_S: Final = 2.0


def end_processes(speakers: Mapping[int, int | None]) -> tuple[int, ...]:
    """End the processes that spoke and are still there; return those that even SIGKILL did not end.

    ``speakers`` maps each to the ticks at which it was started, so that another process of its
    number is left alone.
    """

    def alive() -> tuple[int, ...]:
        _reap()
        return tuple(pid for pid, ticks in speakers.items() if is_same(pid, ticks))

    left = _wait(alive, _ENDS_BY_ITSELF_S)
    for number, wait_s in (
        (signal.SIGTERM, _ENDS_AFTER_TERM_S),
        (signal.SIGKILL, _GONE_AFTER_KILL_S),
    ):
        if left:
            get_logger().info(
                "ending what the failed start left", processes=list(left), signal=number.name
            )
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if left:
            left = _wait(alive, wait_s)
        else:
            left = ()
    return left


def remove_segments(names: Iterable[str], folder: Path = FOLDER) -> tuple[str, ...]:
    """Remove the shared memory of these names that is still there; return the names that were."""
    removed = []
    for name in dict.fromkeys(names):
        if not name or "/" in name:
            continue
        try:
            (folder / name).unlink()
        except OSError:
            continue
        removed.append(name)
        _forget(name)
    return tuple(removed)


def _forget(name: str) -> None:
    """Tell Python's resource tracker, which the processes share, that it has nothing to remove: it
    would warn at the end.
    """
    from multiprocessing import resource_tracker

    if name.startswith(_SEMAPHORE):
        kind = "semaphore"
    else:
        kind = "shared_memory"
    with contextlib.suppress(Exception):
        resource_tracker.unregister(f"/{name.removeprefix(_SEMAPHORE)}", kind)


def _reap() -> None:
    """Collect children of multiprocessing that have ended."""
    from multiprocessing import active_children

    active_children()


def _wait(alive: Callable[[], tuple[int, ...]], seconds: float) -> tuple[int, ...]:
    until_s = time.monotonic() + seconds
    while (left := alive()) and time.monotonic() < until_s:
        time.sleep(0.02)
    return left


# An engine that sleeps (vLLM's sleep mode) and is to wake: the memory that it gave up must be free,
# else its core dies of it.
#
# Its workers told how much each of them gave up; the driver tells what is free now, on the device
# that it has each of them on.

# vllm/v1/worker/gpu_worker.py, sleep; GiB with two decimals.
FREED: Final = re.compile(r"Sleep mode freed ([\d.]+) GiB memory")
_ROUNDED_BYTES: Final = 2**30 // 200


def freed_bytes(rows: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Return what each worker gave up when it was last put to sleep, by process id, as little as
    its rounded words allow.
    """
    found: dict[int, int] = {}
    for row in rows:
        text = row.get("text")
        pid = row.get("pid")
        if (
            isinstance(text, str)
            and isinstance(pid, int)
            and (told := FREED.search(text)) is not None
        ):
            found[pid] = max(0, round(float(told[1]) * 2**30) - _ROUNDED_BYTES)
    return found


def check_room(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise WakeUpError where a device has less free than the engine's workers gave up on it.

    Nothing is checked of a worker that the driver does not show: in a container that hides
    processes, or without NVML.
    """
    freed = freed_bytes(rows)
    for device in devices() or () if freed else ():
        by_pid = device.used_bytes_by_pid or {}
        needed = sum(size for pid, size in freed.items() if pid in by_pid)
        if device.free_bytes is not None and needed > device.free_bytes:
            raise WakeUpError(
                f"the engine is not woken: it needs {format_gib(needed)} of GPU {device.index}, "
                f"{format_gib(device.free_bytes)} is free"
                f"{_holders(device, freed)}",
                hint=(
                    "It still sleeps. End what holds the memory, or put that to sleep, and wake it "
                    "up again."
                ),
            )


def _holders(device: Device, own: Mapping[int, int]) -> str:
    """Return the other processes on a device, the largest first."""
    others = {
        pid: size or 0 for pid, size in (device.used_bytes_by_pid or {}).items() if pid not in own
    }
    largest = sorted(others, key=lambda pid: -others[pid])[:4]
    told = ", ".join(
        f"process {pid} with {format_gib(others[pid])}" if others[pid] else f"process {pid}"
        for pid in largest
    )
    if told:
        return f"; held by {told}"
    return ""


# What the processes of a start print, taken at the descriptor: of one that died before it could
# speak this is all there is.
#
# While the start goes on a pipe lies at the descriptor, and what comes out of it is written to
# where it would have gone. Then this process has its descriptor back. What was started meanwhile
# keeps the pipe, so its pump goes on until the last of it has ended. Copying comes first: nothing
# waits for a diagnosis.

_CHUNK_BYTES: Final = 1 << 16
_MOST_FIRST_BYTES: Final = 1 << 18
_MOST_LAST: Final = 16  # chunks
_DRAINS_WITHIN_S: Final = 0.5


class Capture:
    """Takes what is written to one descriptor, from ``begin`` to ``end``; a descriptor that cannot
    be taken stays as it is.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._saved: int | None = None
        self._pump: _Pump | None = None

    def begin(self) -> None:
        """Lay the pipe; never raises for a descriptor that cannot be taken."""
        _flush()
        reading = writing = out = saved = None
        try:
            saved = os.dup(self._descriptor)
            out = os.dup(self._descriptor)
            reading, writing = os.pipe()
            self._pump = _Pump(reading, out)
            os.dup2(writing, self._descriptor, inheritable=True)
            try:
                self._pump.start()
            except RuntimeError:
                os.dup2(saved, self._descriptor, inheritable=True)
                raise
        except (OSError, RuntimeError):
            self._pump = None
            for one in (reading, out, saved):
                if one is not None:
                    os.close(one)
        else:
            self._saved = saved
        finally:
            if writing is not None:
                os.close(writing)

    def end(self) -> None:
        """Give the descriptor back, and write what has come through the pipe until then."""
        if self._saved is None or self._pump is None:
            return
        _flush()
        saved = self._saved
        self._saved = None
        with contextlib.suppress(OSError):
            os.dup2(saved, self._descriptor, inheritable=True)
        os.close(saved)
        self._pump.drain()

    def text(self) -> str:
        """Return what was written, its beginning and its end; afterwards nothing is
        kept any more.
        """
        if self._pump is None:
            return ""
        return self._pump.taken().decode("utf-8", "replace")


class _Pump(threading.Thread):
    """Copies a pipe to a descriptor until all writers are gone, and owns both; a copy that cannot
    be written is dropped.
    """

    def __init__(self, reading: int, out: int) -> None:
        super().__init__(name="oomguard-pump", daemon=True)
        self._reading = reading
        self._out = out
        self._first = bytearray()
        self._last: deque[bytes] = deque(maxlen=_MOST_LAST)
        self._keeps = True
        self._is_writing = False

    def run(self) -> None:
        """Copy to the end."""
        try:
            while True:
                select.select([self._reading], [], [])
                self._is_writing = (
                    True  # before it is read, so that an empty pipe means that all is written
                )
                data = os.read(self._reading, _CHUNK_BYTES)
                if not data:
                    return
                self._write(data)
                self._keep(data)
                self._is_writing = False
        except (OSError, ValueError):
            return
        finally:
            self._is_writing = False
            os.close(self._reading)
            os.close(self._out)
            self._reading = -1

    def drain(self) -> None:
        """Wait, for a moment at most, until what is in the pipe has been written."""
        until_s = time.monotonic() + _DRAINS_WITHIN_S
        while (
            time.monotonic() < until_s
            and self.is_alive()
            and (self._waiting_bytes() or self._is_writing)
        ):
            time.sleep(0.001)

    def taken(self) -> bytes:
        """Return what was kept, and keep no more."""
        self._keeps = False
        text = bytes(self._first) + b"".join(self._last)
        self._first.clear()
        self._last.clear()
        return text

    def _waiting_bytes(self) -> int:
        try:
            found: int = struct.unpack(
                "i", fcntl.ioctl(self._reading, termios.FIONREAD, b"\0\0\0\0")
            )[0]
        except (OSError, ValueError):
            return 0
        return found

    def _keep(self, data: bytes) -> None:
        if not self._keeps:
            return
        if len(self._first) < _MOST_FIRST_BYTES:
            self._first += data
        else:
            self._last.append(data)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._out, view) :]
            except BlockingIOError:
                select.select([], [self._out], [])
            except (
                OSError
            ):  # its reader is gone, or its disk is full: who writes must not wait for that
                return


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


_ALLOWED: Final = "VLLM_PLUGINS"
_PLUGIN: Final = "oomguard"
_STDOUT = 1
_STDERR = 2
_SIGKILL_STATUS: Final = -9
# Where the engine core ran in this process, its CUDA context does not recover from an error of the
# driver's.
_SPOILS: Final = "CUDA error"
# The environment, the descriptors and the device belong to the process: one start at a time. Two at
# once would also measure each other's memory.
_one_at_a_time = threading.Lock()


def _renew_lock() -> None:
    """In a fork of this process nobody may be left to release it."""
    global _one_at_a_time  # noqa: PLW0603 - of this process
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class VllmStart:
    """A call that starts an engine: ``LLMEngine.from_engine_args`` and its like, which every front
    end goes through.

    Args:
        function: the call's function.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
    """

    phase: str | None = None
    tells_success = True

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._function = function
        self._arguments = StartArguments(function, args, kwargs)
        self._listener = MessageReceiver()
        self._told: set[str] = set()
        self._in_use: dict[str, SettingInForce] = {}
        self.is_given_up: Callable[[], bool] = lambda: False

    def behind(self, incident: Incident) -> None:
        """Return nothing: what the engine printed tells which model it runs."""

    def attempt(
        self, changed: Mapping[str, FactValue], within_s: float | None = None
    ) -> EndedStart:
        """Start the engine with these settings changed, in so many seconds or any number, and
        return how that ended.
        """
        args, kwargs = self._arguments.call(changed)
        with _one_at_a_time, turn(stop=self.is_given_up):
            if self.is_given_up():
                return EndedStart(error=RuntimeError(GIVEN_UP), not_again=GIVEN_UP, is_ended=True)
            before = read_cgroup()
            self._listener = MessageReceiver()
            result = None
            error = None
            watched = StartupWatchdog(self._listener, within_s, self.is_given_up)
            with _heard(self._listener) as captures, watched.lasting():
                try:
                    result = self._function(*args, **kwargs)
                    self._listener.stays = may_attend(result)
                except Exception as raised:  # noqa: BLE001
                    # judged by the caller, and raised again unless it is remedied
                    error = raised.with_traceback(
                        raised.__traceback__ and raised.__traceback__.tb_next
                    )
                    self._listener.settle()
            printed = "\n".join(capture.text() for capture in captures)
        try:
            if error is None:
                return EndedStart(result, lines=lines_of(self._listener.rows(), None))
            return self._failed(error, before, printed, watched)
        finally:
            # The exception's frames hold this one, and it all frames down to the program's: an
            # engine of a later start in one of them would live until a collection.
            del error

    def _failed(
        self, error: Exception, before: Cgroup | None, printed: str, watched: StartupWatchdog
    ) -> EndedStart:
        """Return how a start ended that raised."""
        rows = self._listener.rows()
        after = read_cgroup()
        return EndedStart(
            error=error,
            lines=lines_of(rows, error),
            last_words=last_words(rows),
            printed=printed,
            killed_for_memory=bool(killed_for_memory(_SIGKILL_STATUS, before, after)),
            not_again=watched.ended_because or self._why_not_again(error),
            is_ended=watched.ended_because is not None,
        )

    def attend(self, engine: Any, make_again: MakeAgain) -> None:
        """Hear the engine's processes for as long as it lives, and have it made again where its
        core dies.
        """
        if not self._listener.stays:
            return
        self._in_use = step_in_use(engine)
        weakref.finalize(engine, self._stop_hearing)

        def died(error: Exception, client: LastingClient) -> MadeAgain | None:
            ended = self._ended_at_work(error, client.before)
            client.suspects = in_the_last_step(self._listener.rows())
            return make_again(ended, client.unfinished.progressed)

        attend(engine, died)
        client = weakref.ref(engine.engine_core)
        self.is_given_up = lambda: (lasting := client()) is None or lasting.is_given_up
        engine.engine_core.before_waking = lambda: check_room(self._listener.rows())

    def _stop_hearing(self) -> None:
        """Close the listener of the engine that works now: another one after each death."""
        self._listener.close()

    def _ended_at_work(self, error: Exception, before: Cgroup | None) -> EndedStart:
        """Return how an engine ended that had begun to work."""
        self._listener.settle()
        rows = self._listener.rows()
        return EndedStart(
            error=error,
            lines=lines_of(rows, error),
            last_words=last_words(rows),
            killed_for_memory=bool(killed_for_memory(_SIGKILL_STATUS, before, read_cgroup())),
        )

    def leave_nothing(self) -> None:
        """End what the attempt before left, and drop what was kept of it."""
        gc.collect()
        speakers = self._listener.speakers
        left = end_processes(speakers)
        if left:
            get_logger().warning("what the failed start left does not end", processes=list(left))
        removed = remove_segments(segments_of(self._listener.rows()) if not left else ())
        if removed:
            get_logger().debug(
                "removed what the failed start left in shared memory", segments=list(removed)
            )
        self._listener.close()
        self._listener = MessageReceiver()

    def settings_in_force(self) -> dict[str, SettingInForce]:
        """Return what the program gave the engine, and of one that has worked what its steps had
        beside that.
        """
        return {**self._in_use, **self._arguments.settings_in_force()}

    def carries(self, name: str, facts: Mapping[str, Fact]) -> bool:
        """Return whether a setting can be changed; say once why where a variable beats it."""
        over = self._arguments.beaten_by(name, facts)
        if over is not None and name not in self._told:
            self._told.add(name)
            get_logger().warning(
                "left as it is", setting=name, because=f"{over.source} in the environment sets it"
            )
        return over is None and self._arguments.carries(name)

    def _why_not_again(self, error: Exception) -> str | None:
        """Return why another start in this process would fail whatever its arguments."""
        if self._listener.speakers or _SPOILS not in str(error):
            return None
        return (
            "the engine ran in this process, and a CUDA error stays in it: only a new process will "
            "do"
        )


@contextlib.contextmanager
def _heard(listener: MessageReceiver) -> Iterator[list[Capture]]:
    """Hear what the engine's processes say while it starts, and take what they print; leave
    everything as it was.

    Where they will not speak that is both streams, else the one on which a process prints that dies
    of a signal.
    """
    from multiprocessing import resource_tracker

    before: dict[str, str | None] = {}
    captures: list[Capture] = []
    try:
        listener.open()
        if listener.path is not None:
            variables = {LISTENER: listener.path}
            allowed = os.environ.get(_ALLOWED)
            if allowed is not None:  # an allow-list: joined where the user has one, never made
                variables[_ALLOWED] = ",".join(
                    dict.fromkeys([*filter(None, allowed.split(",")), _PLUGIN])
                )
            before = {name: os.environ.get(name) for name in variables}
            os.environ.update(variables)
            message_sender.be_listener()
            message_sender.speak(listener.path)
        else:
            get_logger().debug("the engine's processes are not heard", reason=listener.problem)
        with contextlib.suppress(Exception):
            # it lives as long as this process, and would keep one of our pipes
            resource_tracker.ensure_running()
        captures += [Capture(_STDERR)]
        if listener.path is None or not _is_installed():
            captures.insert(0, Capture(_STDOUT))
        for capture in captures:
            capture.begin()
        yield captures
    finally:
        for capture in captures:
            capture.end()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        message_sender.fall_silent()
        if not listener.stays:
            listener.close()


def _is_installed() -> bool:
    """Return whether vLLM's processes will find the plugin: where they do not, all that they print
    is taken.
    """
    from importlib import metadata

    try:
        found = metadata.distribution("oomguard").entry_points
    except metadata.PackageNotFoundError:
        return False
    return any(entry.group == GROUP for entry in found)
