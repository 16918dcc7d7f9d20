"""Compare the monotonic clocks of ranks; wall clocks are never used.

Two processes share a monotonic clock if they share a host and a time namespace. Otherwise oomguard
estimates the offset as NTP does. A rank wrote its message at ``written`` and read rank 0's answer
at ``read``, both on its own clock. Rank 0 read the message at ``seen`` on its clock. So ``seen``
lies between ``written`` and ``read``, and the error is at most half of their distance.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_ENDED: Final = (b"Z", b"X")
_NAMESPACES: Final = Path("/proc/self/ns")


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Hold the seconds to add to a clock to get rank 0's clock, and the largest error."""

    offset_s: float
    slack_s: float


def host_identity() -> tuple[str, str, str]:
    """Return IDs of the PID namespace and clock of this process, and the host name.

    The IDs are empty if the system does not report them.
    """
    return _of_this_boot("pid"), _of_this_boot("time"), socket.gethostname()


def _of_this_boot(namespace: str) -> str:
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        return ""
    try:
        return f"{boot}/{(_NAMESPACES / namespace).stat().st_ino}"
    except OSError:  # a kernel without such namespaces has one of each
        return boot


def clock_offset(
    own: tuple[str, str, str],
    leader: tuple[str, str, str],
    written_s: float,
    seen_s: float,
    read_s: float,
) -> ClockOffset:
    """Return the offset from this process's monotonic clock to rank 0's.

    Args:
        own: this host, from ``host``.
        leader: rank 0's host, from ``host``.
        written_s: when this rank wrote the message that rank 0 read, on this clock.
        seen_s: when rank 0 read it, on rank 0's clock.
        read_s: when this rank read rank 0's answer, on this clock.
    """
    if own[1] and own[1] == leader[1]:
        return ClockOffset(0.0, 0.0)
    middle_s = (written_s + read_s) / 2
    return ClockOffset(seen_s - middle_s, (read_s - written_s) / 2)


def started_s(pid: int) -> float | None:
    """Return when a process of this host started, in ticks since boot.

    None means that the process does not exist or is a zombie.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        # The fields are state and starttime: proc_pid_stat(5).
        return None if fields[0] in _ENDED else float(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def own_pid() -> tuple[int, float]:
    """Return the ID of this process and its start time, which identify it on its host."""
    return os.getpid(), started_s(os.getpid()) or 0.0


def now_s() -> float:
    """Return the time of this process's monotonic clock in seconds."""
    return time.monotonic()
