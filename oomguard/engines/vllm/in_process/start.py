"""Start vLLM in this process, read its processes' records, and repeat with changes."""

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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import WakeUpError
from oomguard.core.facts import Fact, FactValue, format_gib
from oomguard.core.incident import Incident, SettingInForce
from oomguard.core.log import get_logger
from oomguard.core.settings import surface
from oomguard.engines.command import Launch
from oomguard.engines.protocol import RestartedEngine, RestartEngine, StartResult
from oomguard.engines.vllm.command import set_by_variable
from oomguard.engines.vllm.in_process import message_sender, step_recovery
from oomguard.engines.vllm.in_process.core_restart import (
    RestartingClient,
    can_restart_core,
    install_restarting_client,
    step_limits,
)
from oomguard.engines.vllm.in_process.message_receiver import (
    MessageReceiver,
    is_same,
    last_tracebacks,
    lines_of,
    reported_arguments,
    requests_in_last_step,
    segments_of,
    settings_of,
)
from oomguard.engines.vllm.plugin import GROUP, LISTENER, STEP_RECOVERY, fitting, is_plain
from oomguard.probe.host import Cgroup, killed_for_memory, read_cgroup
from oomguard.probe.nvml import Device, devices
from oomguard.scan.context import ARGUMENTS

# Guarded starts on one device run one after another: two at once would measure each other's memory.
#
# Each device has a lock file of this user, which all processes share. A forked engine inherits the
# descriptor, so the lock is released explicitly and not only closed.

# The variables that choose a process's devices, in the order in which vLLM's platforms read them.
_VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
_ALL: Final = "all"
# Weights may take minutes to load, but a start that hangs must not block the others.
WAITS_S: Final = 900.0
_LOOKS_EVERY_S: Final = 0.2
# How often to retry if another process removes the lock file meanwhile.
_TRIES: Final = 50


@contextlib.contextmanager
def device_lock(
    folder: Path | None = None,
    *,
    waits_s: float = WAITS_S,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Wait until no other guarded start uses one of these devices, and hold their locks.

    Without a lock file the start is not delayed. After ``waits_s`` seconds the start continues with
    a warning. Once ``stop`` returns true it continues at once.
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
    """A lock on a file that exists only while a process holds it or waits for it."""

    def __init__(self, path: Path, kind: int) -> None:
        self._path = path
        self._kind = kind
        self._descriptor = -1

    def take(self, until_s: float, stop: Callable[[], bool]) -> bool:
        """Take the lock; return whether it is held.

        It is not if the file cannot be made, the time is over, or ``stop`` returns true.
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
                    "another engine still starts", then="this one starts at the same time"
                )
                return False
            if not is_told:
                get_logger().info(
                    "waiting for another engine to start",
                    because="two starts at once would measure each other's memory",
                )
                is_told = True
            time.sleep(_LOOKS_EVERY_S)

    def _is_taken(self) -> bool:
        """Take the lock unless another process holds it. Raises OSError.

        The previous holder may have removed the locked file, so it is checked again.
        """
        for _ in range(_TRIES):
            try:
                descriptor = os.open(
                    self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except FileNotFoundError:
                # The previous holder removed the folder.
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
        """Remove the file if no other process holds it, and unlock it.

        A fork of this process may hold the descriptor too, so closing it would not unlock it.
        """
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path.unlink()
            self._path.parent.rmdir()
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def _locks(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return each lock file with its mode.

    Processes with some devices exclude each other by device. A process that sees all devices
    excludes all others.
    """
    named = ""
    for name in _VARIABLES:
        named = named or environ.get(name, "").strip()
    devices = set(map(str.strip, named.split(",")))
    devices.discard("")
    if not devices:
        return [(f"{_ALL}.lock", fcntl.LOCK_EX)]
    locks = [(f"{_ALL}.lock", fcntl.LOCK_SH)]
    # Always in the same order: two processes with two devices each would wait for each other.
    for device in sorted(devices):
        locks.append((f"{_file_name(device)}.lock", fcntl.LOCK_EX))
    return locks


def _file_name(device: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in device)[:100]


def _private(folder: Path) -> Path | None:
    """Return a folder that only this user can write to; None if there is none."""
    place = folder / f"oomguard-starts-{os.geteuid()}"
    found = None
    # The last holder of a lock may remove the folder between these calls.
    for _ in range(_TRIES):
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


# A failed core asks its workers to end by a signal, which a worker can miss, and waits for them
# without a limit. The front end waits for the core in the same way. The watchdog kills only the
# processes of this start, workers first; then the core ends too.

LOOKS_EVERY_S: Final = 0.5
# Without such a hang, vLLM's processes end within 5 seconds of a failure.
ENDS_WITHIN_S: Final = 20.0
_CORE_FOLLOWS_WITHIN_S: Final = 5.0
GIVEN_UP: Final = "stopped the start, because its caller no longer waits for it"
# vLLM's name for a core process (vllm/v1/engine/utils.py CoreEngineProcManager, 0.10 to 0.32).
_CORE: Final = "EngineCore"


class StartupWatchdog:
    """Ends a start that hangs, takes too long, or is given up.

    Args:
        listener: receives the records of the start's processes.
        within_s: the seconds that the start may take; None: no limit.
        is_given_up: returns whether the caller no longer waits for it.

    Attributes:
        ended_because: why the watchdog ended the start; None if it did not.
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
    def running(self) -> Iterator[StartupWatchdog]:
        """Watch in a thread until the block ends."""
        thread = threading.Thread(target=self._watch, name="oomguard-start-watch", daemon=True)
        # Without another thread the start is not watched.
        with contextlib.suppress(RuntimeError):
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
            stuck = set()
            for pid, at_s in failed.items():
                if now_s - at_s > ENDS_WITHIN_S and self._is_alive(pid):
                    stuck.add(pid)
            late = self._within_s is not None and now_s - self._began_s > self._within_s
            if stuck:
                get_logger().warning("the engine failed and does not end", processes=sorted(stuck))
                self._end_all(spared=stuck)
                return
            if self.ended_because is None and (late or self._is_given_up()):
                if late:
                    limit_s = self._within_s or 0
                    self.ended_because = f"stopped the start, because it took over {limit_s:g} s"
                else:
                    self.ended_because = GIVEN_UP
                get_logger().warning("stopped the engine's start", because=self.ended_because)
            # In each round: a process may have started another one before it was killed.
            if self.ended_because is not None:
                self._end_all(spared=set())

    def _end_all(self, spared: set[int]) -> None:
        """Kill the start's processes; kill those in ``spared`` only if they do not end too."""
        self._kill(set(self._listener.senders) - spared)
        for process in self._new_cores():
            if process.pid not in spared:
                # Another thread may have closed it meanwhile.
                with contextlib.suppress(ValueError):
                    process.kill()
        until_s = time.monotonic() + _CORE_FOLLOWS_WITHIN_S
        while (
            any(map(self._is_alive, spared))
            and time.monotonic() < until_s
            and not self._over.wait(0.05)
        ):
            pass
        self._kill(set(self._listener.senders))

    def _new_cores(self) -> list[BaseProcess]:
        """Return the core processes started since.

        A core sends its first record seconds later, after it has imported the engine.
        """
        children: list[BaseProcess] = []
        # Another thread may start a process right now.
        with contextlib.suppress(RuntimeError):
            children = active_children()
        cores = []
        for process in children:
            if process not in self._before and process.name.startswith(_CORE):
                cores.append(process)
        return cores

    def _kill(self, pids: set[int]) -> None:
        for pid in filter(self._is_alive, pids):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _is_alive(self, pid: int) -> bool:
        return is_same(pid, self._listener.senders.get(pid))


# The first attempt gets the program's own argument object, and later ones get copies: vLLM writes
# into the object during a start.

_ENGINE: Final = "vllm"
_NAME: Final = "engine_args"


class StartArguments:
    """The arguments of one call that starts an engine.

    Args:
        function: the call's function; its signature shows which argument is the engine's.
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
        """Return the call's arguments; the program's own ones if nothing is changed.

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
        """Return the arguments that differ from the engine's defaults, as canonical settings.

        Empty if the call has no readable arguments.
        """
        if not self._is_known:
            return {}
        names = set(reported_arguments())
        differing = {}
        for field in dataclasses.fields(self._first):
            value = getattr(self._first, field.name)
            if field.name in names and is_plain(value) and value != field.default:
                differing[field.name] = value
        known: dict[str, FactValue] = {}
        model = getattr(self._first, "model", None)
        if isinstance(model, str):
            known["model"] = model
        known |= settings_of(differing)
        return {name: SettingInForce(name, value, True, ARGUMENTS) for name, value in known.items()}

    def carries(self, name: str) -> bool:
        """Return whether the engine's arguments have a field for a setting."""
        own = surface(name, _ENGINE, self.version)
        return self._is_known and own.kwarg in {f.name for f in dataclasses.fields(self._first)}

    def beaten_by(self, name: str, facts: Mapping[str, Fact]) -> SettingInForce | None:
        """Return the variable that overrides a setting's argument; None without one."""
        return set_by_variable(Launch((sys.executable,)), name, facts, os.environ)

    def _given(self) -> Any:
        if isinstance(self._position, int):
            return self._args[self._position]
        return self._kwargs.get(_NAME)


def _position(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int | None:
    """Return the index of the engine's arguments among the positional ones; None without it."""
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
    """Return a copy that vLLM may change; fields that cannot be copied are shared."""
    made = copy.copy(arguments)
    for one in dataclasses.fields(arguments):
        value = getattr(arguments, one.name)
        if is_plain(value) or value is None:
            continue
        # Any exception may come from a program's object; then the copy shares it.
        with contextlib.suppress(Exception):
            setattr(made, one.name, copy.deepcopy(value))
    return made


def _version() -> str | None:
    """Return the loaded vLLM's version without its local part; None if it is unknown."""
    found = getattr(sys.modules.get("vllm"), "__version__", None)
    if isinstance(found, str) and found[:1].isdigit():
        return found.partition("+")[0]
    return None


# Clean up after a failed start: only processes that sent records as the engine's, and only shared
# memory that they reported. Other processes and files of the user are never touched.

FOLDER: Final = Path("/dev/shm")  # noqa: S108 - where Python puts it
# The C library's prefix for a semaphore's file there.
_SEMAPHORE: Final = "sem."
# vLLM ends its own processes within this time.
_ENDS_BY_ITSELF_S: Final = 5.0
_ENDS_AFTER_TERM_S: Final = 3.0
_GONE_AFTER_KILL_S: Final = 2.0


def end_processes(senders: Mapping[int, int | None]) -> tuple[int, ...]:
    """End the processes that are still alive; return those that even SIGKILL did not end.

    ``senders`` maps each process to its start in clock ticks, so that a new process with the same
    number is not killed.
    """

    def alive() -> tuple[int, ...]:
        _reap()
        return tuple(filter(lambda pid: is_same(pid, senders[pid]), senders))

    left = _wait(alive, _ENDS_BY_ITSELF_S)
    for number, wait_s in (
        (signal.SIGTERM, _ENDS_AFTER_TERM_S),
        (signal.SIGKILL, _GONE_AFTER_KILL_S),
    ):
        if left:
            get_logger().info(
                "ending processes of the failed start",
                processes=list(left),
                signal=number.name,
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
    """Remove the shared memory segments with these names; return those that were removed."""
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
    """Unregister a removed segment from Python's resource tracker, which would warn at the end."""
    from multiprocessing import resource_tracker

    if name.startswith(_SEMAPHORE):
        kind = "semaphore"
    else:
        kind = "shared_memory"
    with contextlib.suppress(Exception):
        resource_tracker.unregister(f"/{name.removeprefix(_SEMAPHORE)}", kind)


def _reap() -> None:
    """Collect multiprocessing children that have ended."""
    from multiprocessing import active_children

    active_children()


def _wait(alive: Callable[[], tuple[int, ...]], seconds: float) -> tuple[int, ...]:
    until_s = time.monotonic() + seconds
    while (left := alive()) and time.monotonic() < until_s:
        time.sleep(0.02)
    return left


# A sleeping engine (vLLM's sleep mode) needs the memory back that its workers freed, or its core
# dies. The workers logged how much each of them freed, and NVML shows what is free now.

# From vllm/v1/worker/gpu_worker.py, sleep; GiB with two decimals.
FREED: Final = re.compile(r"Sleep mode freed ([\d.]+) GiB memory")
_ROUNDED_BYTES: Final = 2**30 // 200


def freed_bytes(rows: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Return the bytes that each worker freed in its last sleep, by process id.

    The logged value is rounded, so the lowest possible one counts.
    """
    found: dict[int, int] = {}
    for row in rows:
        text = row.get("text")
        pid = row.get("pid")
        if (
            isinstance(text, str)
            and isinstance(pid, int)
            and (freed := FREED.search(text)) is not None
        ):
            found[pid] = max(0, round(float(freed[1]) * 2**30) - _ROUNDED_BYTES)
    return found


def check_room(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise WakeUpError if a device has less free memory than the engine's workers freed on it.

    Workers that the driver does not show are not checked: in a container with its own process ids,
    or without NVML.
    """
    freed = freed_bytes(rows)
    if not freed:
        return
    for device in devices() or ():
        by_pid = device.used_bytes_by_pid or {}
        needed = sum(freed[pid] for pid in freed.keys() & by_pid.keys())
        if device.free_bytes is not None and needed > device.free_bytes:
            if os.getpid() in by_pid and os.getpid() not in freed:
                advice = "Move this program's tensors to the host and call torch.cuda.empty_cache()"
            else:
                advice = "End the other processes or let them sleep"
            raise WakeUpError(
                f"oomguard did not wake the engine after sleep {_sleeps(rows)}: it needs "
                f"{format_gib(needed)} on GPU {device.index}, but "
                f"{format_gib(device.free_bytes)} is free{_holders(device, freed)}",
                hint=f"The engine still sleeps. {advice}, then wake it up again.",
            )


def _sleeps(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return how often the engine slept: its workers each log every sleep."""
    logged = Counter[Any]()
    for row in rows:
        if FREED.search(str(row.get("text"))):
            logged[row.get("pid")] += 1
    return max(logged.values(), default=0)


def _holders(device: Device, own: Mapping[int, int]) -> str:
    """Return the other processes on a device as text, largest first."""
    by_pid = device.used_bytes_by_pid or {}
    # The driver may hide the size of another user's process.
    others = sorted(by_pid.keys() - own.keys(), key=lambda pid: -(by_pid[pid] or 0))
    listed = []
    for pid in others[:4]:
        name = f"{_name(pid)} (PID {pid})"
        size_bytes = by_pid[pid]
        if size_bytes:
            listed.append(f"{name} has {format_gib(size_bytes)}")
        else:
            listed.append(f"{name} has an unknown part")
    if not listed:
        return ""
    return f"; {', '.join(listed)}"


def _name(pid: int) -> str:
    if pid == os.getpid():
        return "this program"
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "another process"


# Capture what a start's processes print: for a process that died before it could send a record,
# this is all there is.
#
# During the start a pipe replaces the descriptor, and a pump copies the pipe to the original
# target. Afterwards this process gets its descriptor back. Child processes keep the pipe, so the
# pump runs until the last of them ends. Copying never waits for a diagnosis.

_CHUNK_BYTES: Final = 1 << 16
_MOST_FIRST_BYTES: Final = 1 << 18
# In chunks.
_MOST_LAST: Final = 16
_DRAINS_WITHIN_S: Final = 0.5


class Capture:
    """Captures what is written to one descriptor, from ``begin`` to ``end``.

    A descriptor that cannot be replaced stays unchanged.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._saved: int | None = None
        self._pump: _Pump | None = None

    def begin(self) -> None:
        """Replace the descriptor by a pipe; never raises if that fails."""
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
        """Restore the descriptor, and copy what is still in the pipe."""
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
        """Return the beginning and the end of the captured text, and stop capturing."""
        if self._pump is None:
            return ""
        return self._pump.taken().decode("utf-8", "replace")


class _Pump(threading.Thread):
    """Copies a pipe to a descriptor until all writers are gone, and owns both.

    Data that cannot be written is dropped.
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
        """Copy until the end of the pipe."""
        try:
            while True:
                select.select([self._reading], [], [])
                # Set before the read, so that an empty pipe means that all data is written.
                self._is_writing = True
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
        """Wait until the pipe's data is written, for at most half a second."""
        until_s = time.monotonic() + _DRAINS_WITHIN_S
        while (
            time.monotonic() < until_s
            and self.is_alive()
            and (self._waiting_bytes() or self._is_writing)
        ):
            time.sleep(0.001)

    def taken(self) -> bytes:
        """Return the captured bytes, and stop capturing."""
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
            except OSError:
                # The reader is gone or the disk is full; the writer must not wait for that.
                return


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


_ALLOWED: Final = "VLLM_PLUGINS"
# The variable of the option --step-recovery.
_STEP_RECOVERY: Final = "OOMGUARD_STEP_RECOVERY"
_PLUGIN: Final = "oomguard"
_STDOUT = 1
_STDERR = 2
_SIGKILL_STATUS: Final = -9
# If the engine core ran in this process, its CUDA context does not recover from a driver error.
_SPOILS: Final = "CUDA error"
# The environment, the descriptors and the device belong to the process, so one start runs at a
# time. Two at once would also measure each other's memory.
_one_at_a_time = threading.Lock()


def _renew_lock() -> None:
    """Replace the lock in a fork of this process, where no thread could release it."""
    global _one_at_a_time  # noqa: PLW0603 - one lock for this process
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class VllmStart:
    """A call that starts an engine, such as ``LLMEngine.from_engine_args``.

    Args:
        function: the call's function.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
    """

    phase: str | None = None
    reports_success = True

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._function = function
        self._arguments = StartArguments(function, args, kwargs)
        self._listener = MessageReceiver()
        self._told: set[str] = set()
        self._in_use: dict[str, SettingInForce] = {}
        self.is_given_up: Callable[[], bool] = lambda: False

    def memory_model(self, incident: Incident) -> None:
        """Return None: the engine's output names its model."""

    def attempt(
        self, changed: Mapping[str, FactValue], within_s: float | None = None
    ) -> StartResult:
        """Start the engine with these settings changed, and return how the attempt ended.

        ``within_s`` None: no time limit.
        """
        args, kwargs = self._arguments.call(changed)
        with _one_at_a_time, device_lock(stop=self.is_given_up):
            if self.is_given_up():
                return StartResult(error=RuntimeError(GIVEN_UP), not_again=GIVEN_UP, is_ended=True)
            before = read_cgroup()
            self._listener = MessageReceiver()
            result = None
            error = None
            watched = StartupWatchdog(self._listener, within_s, self.is_given_up)
            with _receive_and_capture(self._listener) as captures, watched.running():
                try:
                    result = self._function(*args, **kwargs)
                    self._listener.stays = can_restart_core(result)
                except Exception as raised:  # noqa: BLE001
                    # The caller judges it, and raises it again if there is no remedy.
                    error = raised.with_traceback(
                        raised.__traceback__ and raised.__traceback__.tb_next
                    )
                    self._listener.settle()
            printed = "\n".join(capture.text() for capture in captures)
        try:
            if error is None:
                return StartResult(result, lines=lines_of(self._listener.rows(), None))
            return self._failed(error, before, printed, watched)
        finally:
            # The exception's frames refer to this one, and it to the program's frames. Without this
            # an engine of a later start would live until the next garbage collection.
            del error

    def _failed(
        self, error: Exception, before: Cgroup | None, printed: str, watched: StartupWatchdog
    ) -> StartResult:
        """Return the result of a start that raised."""
        rows = self._listener.rows()
        after = read_cgroup()
        return StartResult(
            error=error,
            lines=lines_of(rows, error),
            last_words=last_tracebacks(rows),
            printed=printed,
            killed_for_memory=bool(killed_for_memory(_SIGKILL_STATUS, before, after)),
            not_again=watched.ended_because or self._why_not_again(error),
            is_ended=watched.ended_because is not None,
        )

    def attend(self, engine: Any, make_again: RestartEngine) -> None:
        """Receive the engine's records while it lives, and restart its core after a death."""
        if not self._listener.stays:
            return
        self._in_use = step_limits(engine)
        weakref.finalize(engine, self._close_receiver)

        def died(error: Exception, client: RestartingClient) -> RestartedEngine | None:
            ended = self._ended_at_work(error, client.before)
            client.suspects = requests_in_last_step(self._listener.rows())
            return make_again(ended, client.unfinished.progressed)

        install_restarting_client(engine, died)
        client = weakref.ref(engine.engine_core)
        self.is_given_up = lambda: (lasting := client()) is None or lasting.is_given_up
        engine.engine_core.before_waking = lambda: check_room(self._listener.rows())

    def _close_receiver(self) -> None:
        """Close the receiver of the current engine; each restart makes a new one."""
        self._listener.close()

    def _ended_at_work(self, error: Exception, before: Cgroup | None) -> StartResult:
        """Return how an engine ended after it had started."""
        self._listener.settle()
        rows = self._listener.rows()
        return StartResult(
            error=error,
            lines=lines_of(rows, error),
            last_words=last_tracebacks(rows),
            killed_for_memory=bool(killed_for_memory(_SIGKILL_STATUS, before, read_cgroup())),
        )

    def clean_up(self) -> None:
        """End the processes of the last attempt, and drop its records."""
        gc.collect()
        senders = self._listener.senders
        left = end_processes(senders)
        if left:
            get_logger().warning("processes of the failed start do not end", processes=list(left))
        removed = remove_segments(segments_of(self._listener.rows()) if not left else ())
        if removed:
            get_logger().debug("removed shared memory of the failed start", segments=list(removed))
        self._listener.close()
        self._listener = MessageReceiver()

    def settings_in_force(self) -> dict[str, SettingInForce]:
        """Return the program's engine settings, and the step limits of an engine that has run."""
        return {**self._in_use, **self._arguments.settings_in_force()}

    def carries(self, name: str, facts: Mapping[str, Fact]) -> bool:
        """Return whether a setting can be changed; log once if a variable overrides it."""
        over = self._arguments.beaten_by(name, facts)
        if over is not None and name not in self._told:
            self._told.add(name)
            get_logger().warning(
                f"did not change {name}: an environment variable sets it", variable=over.source
            )
        return over is None and self._arguments.carries(name)

    def _why_not_again(self, error: Exception) -> str | None:
        """Return why another start in this process would fail with any arguments; None if not."""
        if self._listener.senders or _SPOILS not in str(error):
            return None
        return "the engine ran in this process, and its CUDA error stays: start it in a new process"


@contextlib.contextmanager
def _receive_and_capture(listener: MessageReceiver) -> Iterator[list[Capture]]:
    """Receive the records of the engine's processes and capture what they print during a start.

    Afterwards everything is as before. If the processes cannot send records, both streams are
    captured; otherwise only stderr, which has the last output of a process killed by a signal.
    """
    from multiprocessing import resource_tracker

    before: dict[str, str | None] = {}
    captures: list[Capture] = []
    try:
        listener.open()
        if listener.path is not None:
            variables = {LISTENER: listener.path, STEP_RECOVERY: _recovers()}
            allowed = os.environ.get(_ALLOWED)
            # Join the user's allow-list, but never create one: it would turn other plugins off.
            if allowed is not None:
                variables[_ALLOWED] = ",".join(
                    dict.fromkeys([*filter(None, allowed.split(",")), _PLUGIN])
                )
            before = {name: os.environ.get(name) for name in variables}
            os.environ.update(variables)
            if variables[STEP_RECOVERY] == "1":
                with contextlib.suppress(Exception):
                    step_recovery.install()
            message_sender.mark_as_receiver()
            message_sender.start_sending(listener.path)
        else:
            get_logger().debug("cannot receive the engine's log records", reason=listener.problem)
        with contextlib.suppress(Exception):
            # The tracker lives as long as this process, and would keep one of our pipes open.
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
        message_sender.stop_sending()
        if not listener.stays:
            listener.close()


def _recovers() -> str:
    """Return whether the engine survives a step that runs out of memory, as the plugin reads it."""
    asked = os.environ.get(_STEP_RECOVERY, "1").strip().lower()
    if asked in {"0", "false", "no", "off"}:
        return "0"
    return os.environ.get(STEP_RECOVERY, "1")


def _is_installed() -> bool:
    """Return whether vLLM's processes will load the plugin; if not, both streams are captured."""
    from importlib import metadata

    try:
        found = metadata.distribution("oomguard").entry_points
    except metadata.PackageNotFoundError:
        return False
    return any(entry.group == GROUP for entry in found)
