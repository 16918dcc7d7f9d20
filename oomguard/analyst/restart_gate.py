"""Decide between two attempts whether to run the next one, and wait for what it needs.

A server needs its port. Which processes still listen there is read from /proc, without network
traffic.
"""

from __future__ import annotations

import datetime
import errno
import ipaddress
import os
import pwd
import random
import socket
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oomguard import retry
from oomguard.analyst.nested_run import innermost_command
from oomguard.core.incident import Attempt, Incident, Patch
from oomguard.core.log import get_logger
from oomguard.core.presentable import process_list
from oomguard.engines.command import Launch
from oomguard.engines.protocol import Launcher
from oomguard.engines.server import ListenAddress, address_of
from oomguard.probe.nvml import Device
from oomguard.retry import Ledger
from oomguard.supervisor.tree import pids

# An attempt that failed sooner than this did not serve. kubelet also forgets restarts after ten
# minutes.
QUICK_S: Final = 600.0
LONGEST_PAUSE_S: Final = 60.0
JITTER_S: Final = 1.0
_MOST_DOUBLINGS: Final = 10
HOUR_S: Final = 3600.0
_POLL_S: Final = 0.05


def quick_failures(attempts: Sequence[Attempt]) -> int:
    """Return how many of the last attempts in a row ended sooner than ``QUICK_S``."""
    for count, attempt in enumerate(reversed(attempts)):
        if attempt.seconds >= QUICK_S:
            return count
    return len(attempts)


def backoff_s(quick: int) -> float:
    """Return the backoff after quick failures in a row: none after the first, then 1 s to 60 s.

    The first relaunch changes the cause of the failure, so a pause would not help. If it fails
    again, the cause may be another one, which may pass with time. A random part of up to one second
    separates several runs.
    """
    if quick < 2:
        return 0.0
    # The exponent is bounded because a float overflows after about 1,000 failures.
    doublings = min(quick - 2, _MOST_DOUBLINGS)
    backoff_s = 2.0**doublings + random.uniform(0, JITTER_S)  # noqa: S311 - not for cryptography
    return min(backoff_s, LONGEST_PAUSE_S)


def wait(seconds: float, stopped: Callable[[], bool]) -> None:
    """Wait for some seconds, or until ``stopped`` returns True."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0 and not stopped():
        time.sleep(min(left_s, _POLL_S))


class RateLimit:
    """Limit the relaunches within any sixty minutes.

    Args:
        most: the maximum number within an hour.
        clock: returns seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._begun_s: deque[float] = deque(maxlen=max(1, most))

    def used(self) -> int:
        """Return the number of relaunches in the last hour."""
        now_s = self._clock()
        return sum(now_s < began_s + HOUR_S for began_s in self._begun_s)

    def allowed_in_s(self) -> float | None:
        """Return the seconds until the next relaunch may begin (0 for now); None if never."""
        if self.most == 0:
            return None
        if len(self._begun_s) < self.most:
            return 0.0
        return max(0.0, self._begun_s[0] + HOUR_S - self._clock())

    def spend(self) -> None:
        """Count a relaunch that begins now."""
        self._begun_s.append(self._clock())


# A crash loop: starts fail in the same way one after another, although changes took effect in
# between.

# This many starts are a loop: two changes were tried, and the failure is the same.
LOOP_STARTS: Final = 3
# A figure that shrank by no more than this is the same, because an engine's memory varies a little
# between starts.
SAME_RATIO: Final = 0.01
# Needed and available bytes, as failures print them.
_NEEDED_AND_THERE: Final = (
    ("tried_bytes", "device_free_bytes"),
    ("desired_bytes", "device_free_bytes"),
    ("kv_cache_requested_bytes", "device_free_bytes"),
    ("kv_cache_needed_bytes", "kv_cache_available_bytes"),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Describe one failed attempt; ``began_s`` and ``ended_s`` come from the same clock."""

    incident: Incident
    patches: tuple[Patch, ...]
    began_s: float
    ended_s: float

    @property
    def cause(self) -> tuple[str, str, str]:
        """The cause: kind, rule and phase."""
        return self.incident.kind, self.incident.causes[0].rule, self.incident.phase

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.ended_s - self.began_s


class CrashLoop:
    """Track the last failures of a run with the same cause, each after an effective change."""

    def __init__(self) -> None:
        self._alike: list[Failure] = []

    def add(self, attempt: Attempt, began_s: float, *, took_effect: bool) -> None:
        """Record the last failed attempt.

        Args:
            attempt: an attempt with an incident and a cause.
            began_s: when it began.
            took_effect: whether its changes reached the engine.
        """
        # Without an incident the engine refused our own change, which is no memory failure.
        if attempt.incident is None:
            return
        failure = Failure(attempt.incident, attempt.patches, began_s, began_s + attempt.seconds)
        continues_loop = (
            bool(self._alike) and took_effect and failure.cause == self._alike[-1].cause
        )
        if continues_loop and failure.seconds < QUICK_S:
            kept = self._alike
        else:
            kept = []
        if failure.seconds < QUICK_S:
            self._alike = [*kept, failure]
        else:
            self._alike = []

    @property
    def description(self) -> str | None:
        """A description of the loop with its times; None without a loop."""
        if len(self._alike) < LOOP_STARTS:
            return None
        first = self._alike[0]
        last = self._alike[-1]
        kind, rule, phase = last.cause
        places = []
        for word in (rule, phase):
            if word and word != "unknown":
                places.append(word)
        where = ", ".join(places)
        if where:
            of = f"{kind} ({where})"
        else:
            of = kind
        return (
            f"{len(self._alike)} starts in {_shown_s(last.ended_s - first.began_s)}, each failed "
            f"with {of}"
        )

    @property
    def times(self) -> str:
        """How long each of its starts ran."""
        return ", ".join(_shown_s(failure.seconds) for failure in self._alike)

    def is_another_step(self, patches: Sequence[Patch]) -> bool:
        """Return whether these patches only continue changes that did not help.

        A change did not help if the next failure prints the same need and the same shortage. If it
        prints neither, the change counts as helpful. A value that was solved for a predicted figure
        may always be tried.
        """
        if self.description is None or any(patch.predicts for patch in patches):
            return False
        helped: dict[str, bool] = {}
        for before, after in zip(self._alike, self._alike[1:], strict=False):
            shrank = need_shrank(before.incident, after.incident)
            helped |= {patch.setting: shrank is not False for patch in after.patches}
        return all(helped.get(patch.setting, True) is False for patch in patches)


def need_shrank(before: Incident, after: Incident) -> bool | None:
    """Return whether the later failure needed less or missed less; None if neither is printed."""
    answers = []
    for needed, there in _NEEDED_AND_THERE:
        was = _figures(before, needed, there)
        now = _figures(after, needed, there)
        for name, (value, tolerance) in was.items():
            if name in now:
                answers.append(now[name][0] < value - tolerance)
    if answers:
        return any(answers)
    return None


def _figures(incident: Incident, needed: str, there: str) -> dict[str, tuple[float, float]]:
    """Return the figures that shrink if a change helped, each with its tolerance.

    These are the need and the shortage. For an empty KV cache, only the shortage is printed.
    """
    need = incident.number(needed)
    room = incident.number(there)
    if need is None:
        # Free memory alone says nothing without the requested size.
        if room is None or there == "device_free_bytes":
            return {}
        return {"left": (-room, max(SAME_RATIO * abs(room), incident.slack(there)))}
    tolerance = max(SAME_RATIO * need, incident.slack(needed))
    figures = {"need": (need, tolerance)}
    if room is not None:
        figures["missing"] = (need - room, max(tolerance, incident.slack(there)))
    return figures


def _shown_s(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s"


# A start that finds its address taken fails, possibly after loading the model, so wait until the
# address is free.

# An ending process releases its port within this time; a running service keeps it.
LIMIT_S: Final = 10.0
_PORT_WAIT_POLL_S: Final = 0.1


def wait_until_free(
    address: ListenAddress, stopped: Callable[[], bool], *, limit_s: float = LIMIT_S
) -> str | None:
    """Wait until the address can be bound.

    Args:
        address: the address that the next attempt binds.
        stopped: polled while waiting; True ends the wait.
        limit_s: the longest wait.

    Returns:
        A description of the holder after ``limit_s``; None if the address is free, or after a stop.
    """
    until_s = time.monotonic() + limit_s
    while is_taken(address) and not stopped():
        if time.monotonic() >= until_s:
            return _whose(address)
        time.sleep(_PORT_WAIT_POLL_S)
    return None


def is_taken(address: ListenAddress) -> bool:
    """Return whether binding the address fails because it is in use.

    It is bound for a moment with SO_REUSEADDR, as uvicorn does, so connections in TIME_WAIT do not
    matter. vLLM with several API servers also sets SO_REUSEPORT. It would then share the port and
    its requests with a leftover server, so that server counts as a holder. The engine reports any
    other error.
    """
    if address.path is not None:
        return os.path.lexists(address.path)
    if ":" in address.host:
        family = socket.AF_INET6
    else:
        family = socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    except (TypeError, ValueError):
        # bind() does not accept this text as a host name.
        return False
    return False


def remove_left_socket(path: str) -> bool:
    """Remove a Unix socket's file without a listener; return whether it was one and is gone.

    Some servers, such as vLLM, leave the file, and then no server can bind the path again.
    """
    try:
        found = Path(path).lstat()
        if (
            not stat.S_ISSOCK(found.st_mode)
            or found.st_uid != os.geteuid()
            or listens_on_path(path)
        ):
            return False
        Path(path).unlink()
    except OSError:
        return False
    return True


def _whose(address: ListenAddress) -> str:
    if address.path is None:
        return describe_listeners(address)
    try:
        is_socket = stat.S_ISSOCK(Path(address.path).lstat().st_mode)
    except OSError:
        is_socket = False
    if not is_socket:
        return "a file that is not a socket"
    if listens_on_path(address.path):
        return describe_listeners(address)
    return "no process, but the file of an old socket is still there"


# This many equal starts with the same end are a loop.
STARTS_ALIKE: Final = 3


class RestartGate:
    """Decide on and prepare the next attempt of one run.

    Args:
        ledger: the attempts, and the next patches.
        engine: the launcher.
        stopped: whether a signal asked to stop, which ends every wait; also an attribute.
        next_command: returns the command with the next patches, to paste.
    """

    def __init__(
        self,
        ledger: Ledger,
        engine: Launcher,
        stopped: Callable[[], bool],
        next_command: Callable[[], str],
    ) -> None:
        self._ledger = ledger
        self._engine = engine
        self.stopped = stopped
        self._next_command = next_command
        self._budget = RateLimit(ledger.policy.max_per_hour)
        self._loop: CrashLoop | None = None
        # The state of the machine when the current attempt began.
        self._began_s = 0.0
        self._devices: Mapping[int, Device] = {}
        self._had_socket = False

    def begins(self, launch: Launch, began_at: float | None = None) -> None:
        """Record the state of the machine before an attempt.

        Args:
            launch: the command of the attempt.
            began_at: when an already running attempt began, in Unix seconds; None (default) if it
                has not begun.
        """
        address = address_of(innermost_command(launch.argv), self._engine.NAME)
        if address is None:
            path = None
        else:
            path = address.path
        self._had_socket = path is not None and _is_older(path, began_at)
        self._devices = retry.devices_by_index()
        self._began_s = time.monotonic()

    def permits_next(
        self, launch: Launch, attempt: Attempt, folder: Path, devices: Collection[int] | None = None
    ) -> bool:
        """Wait for what the next attempt needs; return whether to run it, and log why not.

        After a stop, no attempt follows.

        Args:
            launch: the command of the failed attempt.
            attempt: how it failed.
            folder: the folder of this run, where the engine reports applied changes.
            devices: the GPUs of the next attempt by index; None if it may use any.
        """
        ended_s = time.monotonic()
        pending = self._ledger.pending
        is_same = self._is_crash_loop(
            attempt, took_effect=not attempt.patches or self._engine.took_effect(launch, folder)
        )
        if not pending or is_same:
            return False
        return self._waits(
            launch, ended_s, backoff_s(quick_failures(self._ledger.attempts)), devices
        )

    def permits_restart(
        self, launch: Launch, attempt: Attempt, devices: Collection[int] | None = None
    ) -> bool:
        """Return whether to rerun the command unchanged, with a backoff before each rerun.

        ``STARTS_ALIKE`` attempts in a row with the same quick end stop the run.
        """
        ended_s = time.monotonic()
        alike = []
        for one in self._ledger.attempts[-STARTS_ALIKE:]:
            if _is_quick_and_like(one, attempt):
                alike.append(one)
        if len(alike) == STARTS_ALIKE:
            ran_for = ", ".join(f"{one.seconds:.1f} s" for one in alike)
            what = f"{STARTS_ALIKE} starts in a row ended in the same way: {attempt.error}"
            get_logger().warning("Crash loop", what=what, ran_for=ran_for)
            self._refuse("another start would end in the same way")
            self._ledger.refuse(f"crash loop: {what}")
            return False
        return self._waits(
            launch, ended_s, backoff_s(1 + quick_failures(self._ledger.attempts)), devices
        )

    def _waits(
        self, launch: Launch, ended_s: float, planned_s: float, devices: Collection[int] | None
    ) -> bool:
        """Wait for what the next attempt needs; return whether to run it."""
        if self._is_hour_spent():
            return False
        if planned_s > 0 and planned_s >= self._ledger.time_left_s():
            self._refuse("the deadline is before the end of the pause", pause_s=round(planned_s, 1))
            return False
        self._wait_for_memory(devices)
        left_s = ended_s + planned_s - time.monotonic()
        if left_s > 0:
            failures = quick_failures(self._ledger.attempts)
            get_logger().info(
                "Waiting before the next attempt", seconds=round(left_s, 1), quick_failures=failures
            )
            wait(left_s, self.stopped)
        if not self._is_address_free(launch) or self.stopped():
            return False
        self._budget.spend()
        return True

    def _is_crash_loop(self, attempt: Attempt, *, took_effect: bool) -> bool:
        """Log a crash loop; return whether it ends the run."""

        loop = self._loop = self._loop or CrashLoop()
        loop.add(attempt, self._began_s, took_effect=took_effect)
        description = loop.description
        pending = self._ledger.pending
        if description is None:
            return False
        is_last = bool(pending) and loop.is_another_step(pending)
        get_logger().warning("Crash loop", what=description, ran_for=loop.times)
        if is_last:
            steps = ", ".join(f"{patch.setting} {patch.old} -> {patch.new}" for patch in pending)
            self._refuse(
                "the only change left is another step of one that did not help", next_step=steps
            )
            self._ledger.refuse(f"crash loop: {description}")
        return is_last

    def _is_hour_spent(self) -> bool:
        wait_s = self._budget.allowed_in_s()
        if wait_s == 0.0:
            return False
        limits = {
            "relaunches_in_the_last_hour": self._budget.used(),
            "max_per_hour": self._budget.most,
        }
        self._refuse(
            "too many relaunches within an hour", **limits, next_allowed_at=_clock_time(wait_s)
        )
        return True

    def _wait_for_memory(self, devices: Collection[int] | None) -> None:
        log = get_logger()
        # A wait beyond the deadline would only delay the end.
        limit_s = min(retry.FREE_LIMIT_S, max(0.0, self._ledger.time_left_s()))
        before = {}
        for i, was in self._devices.items():
            if devices is None or i in devices:
                before[i] = was
        held = retry.wait_until_free(before, self.stopped, limit_s=limit_s)
        if held:
            log.warning("Memory is still in use after the failed attempt", held=held)

    def _is_address_free(self, launch: Launch) -> bool:
        address = address_of(innermost_command(launch.argv), self._engine.NAME)
        if address is None:
            return True

        if address.path is not None and not self._had_socket and remove_left_socket(address.path):
            get_logger().info("Removed the socket of the failed attempt", path=address.path)
        limit_s = min(LIMIT_S, max(0.0, self._ledger.time_left_s()))
        began_s = time.monotonic()
        holder = wait_until_free(address, self.stopped, limit_s=limit_s)
        if holder is not None:
            waited_s = round(time.monotonic() - began_s)
            self._refuse(
                "its address is in use", address=str(address), held_by=holder, waited_s=waited_s
            )
        return holder is None

    def _refuse(self, why: str, **fields: Any) -> None:
        get_logger().warning(f"Not retried: {why}", **fields, command=self._next_command())


def _is_quick_and_like(one: Attempt, last: Attempt) -> bool:
    """Return whether an attempt ended quickly, like the last one, and not because of memory."""
    of_memory = one.incident is not None and one.incident.is_oom
    return one.seconds < QUICK_S and one.error == last.error and not of_memory


def _is_older(path: str, began_at: float | None) -> bool:
    """Return whether a file of this name exists and was created before ``began_at``."""
    try:
        made_at = os.lstat(path).st_ctime
    except OSError:
        return False
    return began_at is None or made_at < began_at


def _clock_time(wait_s: float | None) -> str:
    """Return the time of day, with its zone, in ``wait_s`` seconds."""
    if wait_s is None:
        return "never"
    then = datetime.datetime.now().astimezone() + datetime.timedelta(seconds=wait_s)
    return then.replace(microsecond=0).isoformat()


def cannot_make(folder: Path) -> str | None:
    """Create the folder that a relaunch needs; return why it cannot be created, or None."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return None


_PROC: Final = Path("/proc")


def processes_with_open(is_wanted: Callable[[str], bool]) -> set[int]:
    """Return the readable processes that have a matching file or socket open.

    Args:
        is_wanted: receives the target of each descriptor: a path, or ``socket:[number]``.
    """
    found = set()
    for pid, target in _open_files():
        if is_wanted(target):
            found.add(pid)
    return found


def _open_files() -> Iterator[tuple[int, str]]:
    for pid in pids():
        try:
            for link in (_PROC / str(pid) / "fd").iterdir():
                yield pid, str(link.readlink())
        except OSError:
            # The process has ended, or belongs to another user.
            continue


_NET: Final = Path("/proc/net")
# TCP_LISTEN, include/net/tcp_states.h
_LISTENS: Final = "0A"
# __SO_ACCEPTCON, include/uapi/linux/net.h
_ACCEPTS: Final = 1 << 16
_ANY: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - only compared


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """Describe a listening socket: its inode, its address, and its user if known."""

    inode: int
    bound: ListenAddress
    uid: int | None


def describe_listeners(address: ListenAddress) -> str:
    """Describe who listens at an address."""
    found = list(_on_path(address.path) if address.path is not None else _on_port(address))
    if not found:
        return "unknown, because /proc does not show it"
    sockets = {f"socket:[{listener.inode}]" for listener in found}
    pids = processes_with_open(sockets.__contains__)
    if pids:
        return process_list(sorted(pids))
    others = set()
    for listener in found:
        if listener.uid not in {None, os.geteuid()}:
            others.add(_user(listener.uid))
    if others:
        return f"a process of {', '.join(sorted(others))}, which this user cannot inspect"
    return "a process that this user cannot inspect"


def listening_at(address: ListenAddress) -> dict[ListenAddress, set[int]]:
    """Return the bound addresses that cover an address, with their readable processes."""
    if address.path is not None:
        found = _on_path(address.path)
    else:
        found = _on_port(address)
    owners = {}
    for listener in found:
        owners[listener.bound] = processes_with_open(f"socket:[{listener.inode}]".__eq__)
    return owners


def listens_on_path(path: str) -> bool:
    """Return whether a server accepts connections on a Unix socket, by connecting to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except BlockingIOError:
            # A full queue means that a server listens.
            return True
        except ConnectionRefusedError:
            return False
        except OSError:
            # Without permission, or for another kind of socket, /proc decides.
            return any(_on_path(path))
    return True


def _on_port(address: ListenAddress) -> Iterator[ListeningSocket]:
    ours = _resolved(address)
    for name in ("tcp", "tcp6"):
        for fields in _rows(name):
            place, _, port = fields[1].rpartition(":")
            if len(fields) > 9 and fields[3] == _LISTENS and int(port, 16) == address.port:
                theirs = _decoded(place)
                if theirs in _ANY or not ours or ours & _ANY or theirs in ours:
                    yield ListeningSocket(
                        int(fields[9]), ListenAddress(theirs, address.port), int(fields[7])
                    )


def _on_path(path: str) -> Iterator[ListeningSocket]:
    # all spellings under which it may be bound, including links
    spelled = {path, os.path.abspath(path)}  # noqa: PTH100
    for fields in _rows("unix"):
        if len(fields) > 7 and fields[7] in spelled and int(fields[3], 16) & _ACCEPTS:
            yield ListeningSocket(int(fields[6]), ListenAddress(path=path), None)


def _rows(name: str) -> Iterator[list[str]]:
    try:
        lines = (_NET / name).read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    except OSError:
        return
    yield from (line.split(None, 7) if name == "unix" else line.split() for line in lines)


def _decoded(place: str) -> str:
    """Convert an address from the kernel's format (four bytes in native order) to the usual one."""
    parts = []
    for start in range(0, len(place), 8):
        parts.append(int(place[start : start + 8], 16).to_bytes(4, sys.byteorder))
    packed = b"".join(parts)
    found = ipaddress.ip_address(packed)
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped
    else:
        mapped = None
    return str(mapped or found)


def _resolved(address: ListenAddress) -> set[str]:
    try:
        rows = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError:
        return set()
    return {str(row[4][0]) for row in rows}


def _user(uid: int | None) -> str:
    try:
        return f"user {pwd.getpwuid(uid or 0).pw_name}"
    except KeyError:
        return f"user {uid}"
