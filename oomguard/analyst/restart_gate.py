"""Between a failed attempt and the next: whether there is one, and what it waits for."""

from __future__ import annotations

import datetime
import errno
import fnmatch
import os
import random
import shlex
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from oomguard.analyst.listeners import holders, listens_on_path
from oomguard.analyst.nested_run import innermost
from oomguard.core.facts import format_gib
from oomguard.core.incident import Attempt, Incident, Patch
from oomguard.core.log import get_logger
from oomguard.engines.command import Launch
from oomguard.engines.protocol import Launcher
from oomguard.engines.server import ListenAddress, address_of, shared_memory_names
from oomguard.probe.nvml import Device
from oomguard.retry import memory_wait
from oomguard.retry.ledger import Ledger

# Shared memory that a failed attempt left in /dev/shm: it is the host's memory until somebody
# removes it.
#
# It is named and not removed. Nothing says who made a file there: Python's names (psm_) are drawn
# by chance, a neighbour's run makes the same ones in the same minutes, and a segment that nobody
# has open just now may be one that is being handed over by its name. What Python made is removed by
# its own resource tracker, also where its program was killed: little is ever left.

FOLDER: Final = Path("/dev/shm")  # noqa: S108 - it is what is looked at
_BLOCK_BYTES: Final = 512  # of st_blocks, stat(2)
_SHOWN: Final = 8


class SharedMemoryFile(NamedTuple):
    """A file of shared memory; ``inode`` tells it from a later one of the same name."""

    name: str
    inode: int
    bytes: int
    made_at: float


def known(
    patterns: Iterable[str], folder: Path, before: float | None = None
) -> frozenset[tuple[str, int]]:
    """Return this user's files that are named so and were made before then, by name and inode;
    None: up to now.
    """
    found = (
        segment
        for segment in _segments(patterns, folder)
        if before is None or segment.made_at < before
    )
    return frozenset((segment.name, segment.inode) for segment in found)


def left_since(
    before: frozenset[tuple[str, int]], patterns: Iterable[str], folder: Path
) -> tuple[SharedMemoryFile, ...]:
    """Return the segments that were not known before and that no process has open or mapped, the
    largest first.
    """
    new = [
        segment
        for segment in _segments(patterns, folder)
        if (segment.name, segment.inode) not in before
    ]
    if not new:
        return ()
    from oomguard.analyst.listeners import in_use

    used = in_use(str(folder / segment.name) for segment in new)
    left = [segment for segment in new if str(folder / segment.name) not in used]
    return tuple(sorted(left, key=lambda segment: (-segment.bytes, segment.name)))


def _segments(patterns: Iterable[str], folder: Path) -> Iterator[SharedMemoryFile]:
    wanted = tuple(patterns)
    try:
        if wanted:
            entries = list(os.scandir(folder))
        else:
            entries = []
    except OSError:
        return
    for entry in entries:
        if not any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in wanted):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode):
            yield SharedMemoryFile(
                entry.name, status.st_ino, status.st_blocks * _BLOCK_BYTES, status.st_ctime
            )


def told(left: tuple[SharedMemoryFile, ...], folder: Path) -> dict[str, str]:
    """Return the text about them: what they take, and the command that removes them."""
    shown = left[:_SHOWN]
    if len(left) > len(shown):
        more = f", {len(left) - len(shown)} more"
    else:
        more = ""
    return {
        "segments": ", ".join(f"{segment.name} ({format_gib(segment.bytes)})" for segment in shown)
        + more,
        "remove": shlex.join(["rm", *(str(folder / segment.name) for segment in shown)]),
    }


# How long a relaunch waits, and how many of them an hour may have.

# An attempt that failed sooner than this did not serve: as kubelet, which forgets a container's
# restarts after ten minutes.
QUICK_S: Final = 600.0
LONGEST_PAUSE_S: Final = 60.0
JITTER_S: Final = 1.0
_MOST_DOUBLINGS: Final = 10
HOUR_S: Final = 3600.0
_POLL_S: Final = 0.05


def quick_failures(attempts: Sequence[Attempt]) -> int:
    """Return how many attempts, up to the last one and in a row, ended sooner than ``QUICK_S``."""
    for count, attempt in enumerate(reversed(attempts)):
        if attempt.seconds >= QUICK_S:
            return count
    return len(attempts)


def pause_s(quick: int) -> float:
    """Return the pause after so many quick failures in a row: none after the first, then 1 s,
    doubled up to 60 s.

    The first relaunch changes what the failure was for, and a pause changes nothing about that.
    Where it fails again, something else may be at work that takes its time. A random part of up to
    a second keeps several runs apart.
    """
    if quick < 2:
        return 0.0
    # The exponent is bounded because a float overflows after about 1,000 failures.
    doublings = min(quick - 2, _MOST_DOUBLINGS)
    backoff_s = 2.0**doublings + random.uniform(0, JITTER_S)  # noqa: S311 - not for cryptography
    return min(backoff_s, LONGEST_PAUSE_S)


def rest(seconds: float, stopped: Callable[[], bool]) -> None:
    """Wait so long, or until ``stopped`` says so."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0 and not stopped():
        time.sleep(min(left_s, _POLL_S))


class HourBudget:
    """Counts the relaunches of any sixty minutes.

    Args:
        most: so many may begin within an hour.
        clock: tells the seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._begun_s: deque[float] = deque(maxlen=max(1, most))

    def used(self) -> int:
        """Return the relaunches of the last hour."""
        now_s = self._clock()
        return sum(now_s < began_s + HOUR_S for began_s in self._begun_s)

    def allowed_in_s(self) -> float | None:
        """Return in how many seconds the next one may begin, 0 for now; None where none
        ever may.
        """
        if self.most == 0:
            return None
        if len(self._begun_s) < self.most:
            return 0.0
        return max(0.0, self._begun_s[0] + HOUR_S - self._clock())

    def spend(self) -> None:
        """Count a relaunch that begins now."""
        self._begun_s.append(self._clock())


# A crash loop: starts that fail alike one after the other, though a change took effect in between.

# So many starts are a loop: two changes were tried, and the failure is the same.
LOOP_STARTS: Final = 3
# A figure that is smaller by no more than this is the same: what an engine holds varies a little
# from start to start.
SAME_RATIO: Final = 0.01
# What was needed, and what was there for it, as failures print it.
_NEEDED_AND_THERE: Final = (
    ("tried_bytes", "device_free_bytes"),
    ("desired_bytes", "device_free_bytes"),
    ("kv_cache_requested_bytes", "device_free_bytes"),
    ("kv_cache_needed_bytes", "kv_cache_available_bytes"),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt; ``began_s`` and ``ended_s`` are of one clock."""

    incident: Incident
    patches: tuple[Patch, ...]
    began_s: float
    ended_s: float

    @property
    def cause(self) -> tuple[str, str, str]:
        """What it failed of: kind, rule, phase."""
        return self.incident.kind, self.incident.causes[0].rule, self.incident.phase

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.ended_s - self.began_s


class CrashLoop:
    """The last failures of a run that are alike, each after a change that took effect."""

    def __init__(self) -> None:
        self._alike: list[Failure] = []

    def add(self, attempt: Attempt, began_s: float, *, took_effect: bool) -> None:
        """Take note of the attempt that failed last.

        Args:
            attempt: has an incident with a cause.
            began_s: when it began.
            took_effect: whether what it changed reached the engine.
        """
        if (
            attempt.incident is None
        ):  # a request refused by our own change: no failure of memory, and it is taken back
            return
        failure = Failure(attempt.incident, attempt.patches, began_s, began_s + attempt.seconds)
        goes_on = bool(self._alike) and took_effect and failure.cause == self._alike[-1].cause
        if goes_on and failure.seconds < QUICK_S:
            kept = self._alike
        else:
            kept = []
        if failure.seconds < QUICK_S:
            self._alike = [*kept, failure]
        else:
            self._alike = []

    @property
    def said(self) -> str | None:
        """Describe the loop, with its times; None without a loop."""
        if len(self._alike) < LOOP_STARTS:
            return None
        first = self._alike[0]
        last = self._alike[-1]
        kind, rule, phase = last.cause
        where = ", ".join(word for word in (rule, phase) if word and word != "unknown")
        if where:
            of = f"{kind} ({where})"
        else:
            of = kind
        return (
            f"{len(self._alike)} starts in {_shown_s(last.ended_s - first.began_s)}, each failed "
            f"of {of}"
        )

    @property
    def times(self) -> str:
        """How long each of its starts ran."""
        return ", ".join(_shown_s(failure.seconds) for failure in self._alike)

    def is_another_step(self, patches: Sequence[Patch]) -> bool:
        """Return whether these patches only go on with changes that did not help, in a loop.

        A change did not help where the failure after it prints the same need and the same shortage;
        where it prints neither, nothing is concluded. A value that was solved to a predicted figure
        may be tried in any case.
        """
        if self.said is None or any(patch.predicts for patch in patches):
            return False
        helped: dict[str, bool] = {}
        for before, after in zip(self._alike, self._alike[1:], strict=False):
            shrank = need_shrank(before.incident, after.incident)
            helped |= {patch.setting: shrank is not False for patch in after.patches}
        return all(helped.get(patch.setting, True) is False for patch in patches)


def need_shrank(before: Incident, after: Incident) -> bool | None:
    """Return whether less was needed, or less was missing, in the later of two failures; None where
    neither tells.
    """
    answers = []
    for needed, there in _NEEDED_AND_THERE:
        was = _figures(before, needed, there)
        now = _figures(after, needed, there)
        answers += [
            now[name][0] < value - tolerance
            for name, (value, tolerance) in was.items()
            if name in now
        ]
    if answers:
        return any(answers)
    return None


def _figures(incident: Incident, needed: str, there: str) -> dict[str, tuple[float, float]]:
    """Return what is smaller where a change helped, each with what it may vary by.

    They are the need, and what is missing; of a KV cache that nothing is left for only what is
    missing is printed.
    """
    need = incident.number(needed)
    room = incident.number(there)
    if need is None:
        if (
            room is None or there == "device_free_bytes"
        ):  # what is free says nothing without what was asked for
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


# Wait until a server's address is free: a start that finds it taken fails after it has loaded the
# model, or before.

# A process that is ending has let go of its port by then; a service that runs keeps it.
LIMIT_S: Final = 10.0
_PORT_WAIT_POLL_S: Final = 0.1


def wait_until_free(
    address: ListenAddress, stopped: Callable[[], bool], *, limit_s: float = LIMIT_S
) -> str | None:
    """Wait until the address can be bound.

    Args:
        address: what the next attempt binds.
        stopped: asked while waiting; once true, waiting ends.
        limit_s: the longest wait.

    Returns who holds it after ``limit_s``, to read; None when it is free, and after a stop.
    """
    until_s = time.monotonic() + limit_s
    while is_taken(address) and not stopped():
        if time.monotonic() >= until_s:
            return _whose(address)
        time.sleep(_PORT_WAIT_POLL_S)
    return None


def is_taken(address: ListenAddress) -> bool:
    """Return whether binding the address fails because it is in use.

    It is bound for a moment as uvicorn does, with SO_REUSEADDR: connections in TIME_WAIT are in
    nobody's way. vLLM with several API servers also sets SO_REUSEPORT, with which it would share
    the port, and so its requests, with a server that was left
    there: that one counts as a holder. Any other error is the engine's to tell.
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
    except (TypeError, ValueError):  # no name of a host, as bind() says it
        return False
    return False


def remove_left_socket(path: str) -> bool:
    """Remove the file of a Unix socket that nobody listens on; return whether it was one and is
    gone.

    The kernel leaves it where the server does not remove it, as vLLM, and then no server can bind
    the path again.
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
        return holders(address)
    try:
        is_socket = stat.S_ISSOCK(Path(address.path).lstat().st_mode)
    except OSError:
        is_socket = False
    if not is_socket:
        return "a file that is no socket"
    if listens_on_path(address.path):
        return holders(address)
    return "nobody: the file of a socket that was left behind"


# What only a failure needs is loaded when there is one: the command starts at once.


# So many starts as they were that end alike are a loop.
STARTS_ALIKE: Final = 3


class Between:
    """What comes between the attempts of one run.

    Args:
        ledger: the attempts, and the patches that are next.
        engine: what the command starts.
        stopped: whether a signal asked to stop: every wait ends then; an attribute too.
        next_command: returns the command with the next patches, to paste.
        shared_memory: the folder where shared memory has its names.
    """

    def __init__(
        self,
        ledger: Ledger,
        engine: Launcher,
        stopped: Callable[[], bool],
        next_command: Callable[[], str],
        shared_memory: Path = FOLDER,
    ) -> None:
        self._ledger = ledger
        self._engine = engine
        self.stopped = stopped
        self._next_command = next_command
        self._shared_memory = shared_memory
        self._budget = HourBudget(ledger.policy.max_per_hour)
        self._loop: CrashLoop | None = None
        # The machine as the attempt under way found it.
        self._began_s = 0.0
        self._devices: Mapping[int, Device] = {}
        self._segments: frozenset[tuple[str, int]] = frozenset()
        self._had_socket = False

    def begins(self, launch: Launch, began_at: float | None = None) -> None:
        """Take note of the machine before an attempt.

        Args:
            launch: the command of the attempt.
            began_at: when one that runs already began, in Unix seconds; None (default): it has not
                begun.
        """
        address = address_of(innermost(launch.argv), self._engine.NAME)
        if address is None:
            path = None
        else:
            path = address.path
        self._had_socket = path is not None and _is_older(path, began_at)
        names = shared_memory_names(self._engine.NAME)
        self._segments = known(names, self._shared_memory, began_at)
        self._devices = memory_wait.devices_by_index()
        self._began_s = time.monotonic()

    def leads_on(
        self, launch: Launch, attempt: Attempt, folder: Path, devices: Collection[int] | None = None
    ) -> bool:
        """Wait for what the next attempt needs; return whether to make it (never after a stop), and
        tell why not.

        Args:
            launch: the command of the attempt that failed.
            attempt: how it failed.
            folder: of this run, where the engine tells which change it took.
            devices: the GPUs of the next attempt by index; None: it may use any.
        """
        ended_s = time.monotonic()
        pending = self._ledger.pending
        is_same = self._is_crash_loop(
            attempt, took_effect=not attempt.patches or self._engine.took_effect(launch, folder)
        )
        if not pending or is_same:
            return False
        return self._waits(launch, ended_s, pause_s(quick_failures(self._ledger.attempts)), devices)

    def restarts(
        self, launch: Launch, attempt: Attempt, devices: Collection[int] | None = None
    ) -> bool:
        """Return whether to make the next attempt with the command as it was, as ``leads_on`` does,
        with a pause before each.

        ``STARTS_ALIKE`` in a row that ended alike, each sooner than ``QUICK_S``, end the run.
        """
        ended_s = time.monotonic()
        alike = [
            one for one in self._ledger.attempts[-STARTS_ALIKE:] if _is_quick_and_like(one, attempt)
        ]
        if len(alike) == STARTS_ALIKE:
            ran_for = ", ".join(f"{one.seconds:.1f} s" for one in alike)
            what = f"{STARTS_ALIKE} starts in a row, each ended of the same: {attempt.error}"
            get_logger().warning("crash loop", what=what, ran_for=ran_for)
            self._refuse("another start would end alike")
            self._ledger.refuse(f"crash loop: {what}")
            return False
        return self._waits(
            launch, ended_s, pause_s(1 + quick_failures(self._ledger.attempts)), devices
        )

    def _waits(
        self, launch: Launch, ended_s: float, planned_s: float, devices: Collection[int] | None
    ) -> bool:
        """Wait for what the next attempt needs; return whether to make it."""
        if self._is_hour_spent():
            return False
        if planned_s > 0 and planned_s >= self._ledger.time_left_s():
            self._refuse(
                "the deadline comes before the end of the pause", pause_s=round(planned_s, 1)
            )
            return False
        self._wait_for_memory(devices)
        left_s = ended_s + planned_s - time.monotonic()
        if left_s > 0:
            failures = quick_failures(self._ledger.attempts)
            get_logger().info(
                "waiting before the next attempt", seconds=round(left_s, 1), quick_failures=failures
            )
            rest(left_s, self.stopped)
        if not self._is_address_free(launch) or self.stopped():
            return False
        self._budget.spend()
        return True

    def _is_crash_loop(self, attempt: Attempt, *, took_effect: bool) -> bool:
        """Tell a crash loop; return whether it ends the run."""

        loop = self._loop = self._loop or CrashLoop()
        loop.add(attempt, self._began_s, took_effect=took_effect)
        said = loop.said
        pending = self._ledger.pending
        if said is None:
            return False
        is_last = bool(pending) and loop.is_another_step(pending)
        get_logger().warning("crash loop", what=said, ran_for=loop.times)
        if is_last:
            steps = ", ".join(f"{patch.setting} {patch.old} -> {patch.new}" for patch in pending)
            self._refuse("only another step of a change that did not help is left", next_step=steps)
            self._ledger.refuse(f"crash loop: {said}")
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
        limit_s = min(memory_wait.LIMIT_S, max(0.0, self._ledger.time_left_s()))
        before = {i: was for i, was in self._devices.items() if devices is None or i in devices}
        held = memory_wait.wait_until_free(before, self.stopped, limit_s=limit_s)
        if held:
            log.warning("memory is still held after the failed attempt", held=held)
        names = shared_memory_names(self._engine.NAME)
        left = left_since(self._segments, names, self._shared_memory)
        if left:
            what = told(left, self._shared_memory)
            log.warning("shared memory was left behind while the failed attempt ran", **what)

    def _is_address_free(self, launch: Launch) -> bool:
        address = address_of(innermost(launch.argv), self._engine.NAME)
        if address is None:
            return True

        if address.path is not None and not self._had_socket and remove_left_socket(address.path):
            get_logger().info("removed the socket that the failed attempt left", path=address.path)
        limit_s = min(LIMIT_S, max(0.0, self._ledger.time_left_s()))
        began_s = time.monotonic()
        holder = wait_until_free(address, self.stopped, limit_s=limit_s)
        if holder is not None:
            waited_s = round(time.monotonic() - began_s)
            self._refuse(
                "its address is taken", address=str(address), held_by=holder, waited_s=waited_s
            )
        return holder is None

    def _refuse(self, why: str, **told: Any) -> None:
        get_logger().warning(f"not run again: {why}", **told, command=self._next_command())


def _is_quick_and_like(one: Attempt, last: Attempt) -> bool:
    """Return whether an attempt ended soon, of the same as the last one, and not of memory."""
    of_memory = one.incident is not None and one.incident.is_oom
    return one.seconds < QUICK_S and one.error == last.error and not of_memory


def _is_older(path: str, began_at: float | None) -> bool:
    """Return whether something of this name is there and was made before then."""
    try:
        made_at = os.lstat(path).st_ctime
    except OSError:
        return False
    return began_at is None or made_at < began_at


def _clock_time(wait_s: float | None) -> str:
    """Return the time of day, with its zone, in so many seconds."""
    if wait_s is None:
        return "never"
    then = datetime.datetime.now().astimezone() + datetime.timedelta(seconds=wait_s)
    return then.replace(microsecond=0).isoformat()


def cannot_make(folder: Path) -> str | None:
    """Make the folder that a relaunch needs; return why it cannot be made."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return None
