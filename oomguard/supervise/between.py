"""Between a failed attempt and the next: whether there is one, and what it waits for."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomguard.attempting import memory_wait
from oomguard.attempting.ledger import Ledger
from oomguard.engines.command import Launch
from oomguard.engines.listening import address_of, shared_memory_names
from oomguard.engines.protocol import Launcher
from oomguard.incident import Attempt
from oomguard.log import get_logger
from oomguard.observe.nvml import Device
from oomguard.supervise import left_memory
from oomguard.supervise.nesting import innermost
from oomguard.supervise.pauses import QUICK_S, HourBudget, pause_s, quick_failures, rest

# What only a failure needs is loaded when there is one: the command starts at once.
if TYPE_CHECKING:
    from oomguard.supervise.crash_loop import CrashLoop


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
        shared_memory: Path = left_memory.FOLDER,
    ) -> None:
        self._ledger, self._engine = ledger, engine
        self.stopped, self._next_command, self._shared_memory = stopped, next_command, shared_memory
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
            began_at: when one that runs already began, in Unix seconds; None (default): it has not begun.
        """
        address = address_of(innermost(launch.argv), self._engine.NAME)
        path = None if address is None else address.path
        self._had_socket = path is not None and _is_older(path, began_at)
        names = shared_memory_names(self._engine.NAME)
        self._segments = left_memory.known(names, self._shared_memory, began_at)
        self._devices, self._began_s = memory_wait.devices_by_index(), time.monotonic()

    def leads_on(self, launch: Launch, attempt: Attempt, folder: Path, devices: Collection[int] | None = None) -> bool:
        """Wait for what the next attempt needs; return whether to make it (never after a stop), and tell why not.

        Args:
            launch: the command of the attempt that failed.
            attempt: how it failed.
            folder: of this run, where the engine tells which change it took.
            devices: the GPUs of the next attempt by index; None: it may use any.
        """
        ended_s, pending = time.monotonic(), self._ledger.pending
        is_same = self._is_crash_loop(
            attempt, took_effect=not attempt.patches or self._engine.took_effect(launch, folder)
        )
        if not pending or is_same:
            return False
        return self._waits(launch, ended_s, pause_s(quick_failures(self._ledger.attempts)), devices)

    def restarts(self, launch: Launch, attempt: Attempt, devices: Collection[int] | None = None) -> bool:
        """Return whether to make the next attempt with the command as it was, as ``leads_on`` does, with a pause before each.

        ``STARTS_ALIKE`` in a row that ended alike, each sooner than ``QUICK_S``, end the run.
        """
        ended_s = time.monotonic()
        alike = [one for one in self._ledger.attempts[-STARTS_ALIKE:] if _is_quick_and_like(one, attempt)]
        if len(alike) == STARTS_ALIKE:
            ran_for = ", ".join(f"{one.seconds:.1f} s" for one in alike)
            what = f"{STARTS_ALIKE} starts in a row, each ended of the same: {attempt.error}"
            get_logger().warning("crash loop", what=what, ran_for=ran_for)
            self._refuse("another start would end alike")
            self._ledger.refuse(f"crash loop: {what}")
            return False
        return self._waits(launch, ended_s, pause_s(1 + quick_failures(self._ledger.attempts)), devices)

    def _waits(self, launch: Launch, ended_s: float, planned_s: float, devices: Collection[int] | None) -> bool:
        """Wait for what the next attempt needs; return whether to make it."""
        if self._is_hour_spent():
            return False
        if planned_s > 0 and planned_s >= self._ledger.time_left_s():
            self._refuse("the deadline comes before the end of the pause", pause_s=round(planned_s, 1))
            return False
        self._wait_for_memory(devices)
        left_s = ended_s + planned_s - time.monotonic()
        if left_s > 0:
            failures = quick_failures(self._ledger.attempts)
            get_logger().info("waiting before the next attempt", seconds=round(left_s, 1), quick_failures=failures)
            rest(left_s, self.stopped)
        if not self._is_address_free(launch) or self.stopped():
            return False
        self._budget.spend()
        return True

    def _is_crash_loop(self, attempt: Attempt, *, took_effect: bool) -> bool:
        """Tell a crash loop; return whether it ends the run."""
        from oomguard.supervise.crash_loop import CrashLoop

        loop = self._loop = self._loop or CrashLoop()
        loop.add(attempt, self._began_s, took_effect=took_effect)
        said, pending = loop.said, self._ledger.pending
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
        limits = {"relaunches_in_the_last_hour": self._budget.used(), "max_per_hour": self._budget.most}
        self._refuse("too many relaunches within an hour", **limits, next_allowed_at=_clock_time(wait_s))
        return True

    def _wait_for_memory(self, devices: Collection[int] | None) -> None:
        log, limit_s = get_logger(), min(memory_wait.LIMIT_S, max(0.0, self._ledger.time_left_s()))
        before = {i: was for i, was in self._devices.items() if devices is None or i in devices}
        held = memory_wait.wait_until_free(before, self.stopped, limit_s=limit_s)
        if held:
            log.warning("memory is still held after the failed attempt", held=held)
        names = shared_memory_names(self._engine.NAME)
        left = left_memory.left_since(self._segments, names, self._shared_memory)
        if left:
            what = left_memory.told(left, self._shared_memory)
            log.warning("shared memory was left behind while the failed attempt ran", **what)

    def _is_address_free(self, launch: Launch) -> bool:
        address = address_of(innermost(launch.argv), self._engine.NAME)
        if address is None:
            return True
        from oomguard.supervise import port_wait

        if address.path is not None and not self._had_socket and port_wait.remove_left_socket(address.path):
            get_logger().info("removed the socket that the failed attempt left", path=address.path)
        limit_s, began_s = min(port_wait.LIMIT_S, max(0.0, self._ledger.time_left_s())), time.monotonic()
        holder = port_wait.wait_until_free(address, self.stopped, limit_s=limit_s)
        if holder is not None:
            waited_s = round(time.monotonic() - began_s)
            self._refuse("its address is taken", address=str(address), held_by=holder, waited_s=waited_s)
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
