"""A member of the process group that the command shares with oomguard: it tells which signals the whole group had.

Those have reached the command already. The watcher asks; it has its own group, so that killing oomguard leaves it to end the rest.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import time
from typing import Final

from oomguard.supervise.process_control import die_with_parent, set_command_line, set_name
from oomguard.supervise.signal_sets import BY_KEY, SI_KERNEL, handed_on, waits_once

# The kernel and kill() reach the members of a group one after the other, within microseconds; a busy machine may part them.
_LATE_S: Final = 0.05
# A signal that we never asked about, since it merged with another at oomguard, is not taken for a later one.
_FORGOTTEN_S: Final = 2.0
_RECORD: Final = struct.Struct("iii")
# Not ours: who looks for oomguard by name means one process, and what all that match get would look like the group's. Who looks
# for the command's words (``pkill -f``) means the command too, which then has it already.
_NAME: Final = "group-witness"


class Witness:
    """The process, and what it told and nobody has asked about.

    Args:
        group: the process group that it joins.
        words: the command's, which its own command line shows.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, group: int, words: list[bytes]) -> None:
        self.group = group
        self._told: list[tuple[float, int, int, int]] = []
        self._had: dict[tuple[int, int, int | None], float] = {}
        self._looked_s = 0.0  # when it had nothing more to tell
        self._reader, writer = os.pipe()
        watcher = os.getpid()
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _serve(writer, watcher, group, words)
        finally:
            os.close(writer)

    def had(self, number: int, code: int, sender: int | None, came_s: float) -> bool:
        """Return whether the group has the signal of which oomguard was told by whom, how and when (monotonic) it came.

        Who signals oomguard and then its group (timeout) sends two that are one to a command alone: the second comes while it waits.
        """
        by_key = code == SI_KERNEL and number in BY_KEY  # of two quick ones it may have only the first
        # Those of a burst wait together: for one that came so long before the last look it is too late now.
        deadline = time.monotonic() + (0.0 if came_s + _LATE_S <= self._looked_s else _LATE_S)
        while True:
            for told in self._told:
                if told[1] == number and (by_key or told[2:] == (code, sender)):
                    self._told.remove(told)
                    self._had = {one: at_s for one, at_s in self._had.items() if came_s - at_s < _FORGOTTEN_S}
                    self._had[number, code, sender] = came_s
                    return True
            if by_key:
                return True
            if not self._read(max(0.0, deadline - time.monotonic())):
                self._looked_s = time.monotonic()
                had_s = self._had.get((number, code, sender))
                return had_s is not None and came_s - had_s < _LATE_S and waits_once(number)

    def close(self) -> None:
        """End the process and take its status, once nothing of the command is left in the group.

        A process whose parent is of its session and of another group ties its own group to the session. Where the last tie of a
        group ends, the kernel hangs the group up if one of it is stopped (exit_notify in kernel/exit.c); who leaves first does not.
        """
        with contextlib.suppress(OSError):  # it is gone, or the watcher leads a session by now: no tie
            os.setpgid(self.pid, os.getpgrp())
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # reaped with the others
            os.waitpid(self.pid, 0)
        os.close(self._reader)

    def _read(self, timeout_s: float) -> bool:
        """Read what it tells, once it does; return False where it tells nothing in time, or is gone."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return False
        record = os.read(self._reader, _RECORD.size)
        now = time.monotonic()
        self._told = [told for told in self._told if now - told[0] < _FORGOTTEN_S]
        if len(record) == _RECORD.size:
            self._told.append((now, *_RECORD.unpack(record)))
        return bool(record)


def _serve(writer: int, watcher: int, group: int, words: list[bytes]) -> None:
    try:
        die_with_parent(watcher)
        os.setpgid(0, group)
        set_name(_NAME)
        set_command_line(b" ".join([_NAME.encode(), *words]))
        os.dup2(writer, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        signal.set_wakeup_fd(-1)
        numbers = handed_on()
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        while True:
            info = signal.sigwaitinfo(numbers)
            os.write(3, _RECORD.pack(info.si_signo, info.si_code, info.si_pid))
    finally:
        os._exit(0)
