"""Whose clock shows what: the monotonic clocks of two hosts have nothing in common, and wall clocks
are never asked.

Two processes have one monotonic clock where host and time namespace are the same. Else rank 0's is
estimated as NTP does it: a rank wrote its document at ``written`` on its own clock, rank 0 read it
at ``seen`` on its own, and the rank read that at ``read``. So rank 0's ``seen`` lies between the
two, and half of their distance is how far off the estimate may be.
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
class Offset:
    """What has to be added to a clock to have rank 0's, and how far off that may be, in seconds."""

    offset_s: float
    slack_s: float


def host() -> tuple[str, str, str]:
    """Return what tells whose process ids are ours, whose clock, and the host's name; the first two
    are empty where nothing tells.
    """
    return _of_this_boot("pid"), _of_this_boot("time"), socket.gethostname()


def _of_this_boot(namespace: str) -> str:
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        return ""
    try:
        return f"{boot}/{(_NAMESPACES / namespace).stat().st_ino}"
    except OSError:  # a kernel without such namespaces: one a host
        return boot


def offset(
    own: tuple[str, str, str],
    leader: tuple[str, str, str],
    written_s: float,
    seen_s: float,
    read_s: float,
) -> Offset:
    """Return the offset of this process's monotonic clock to rank 0's.

    Args:
        own: this host, as ``host`` has it.
        leader: rank 0's.
        written_s: when this rank wrote what rank 0 read, on this clock.
        seen_s: when rank 0 read it, on its own.
        read_s: when this rank read that, on this clock.
    """
    if own[1] and own[1] == leader[1]:
        return Offset(0.0, 0.0)
    middle_s = (written_s + read_s) / 2
    return Offset(seen_s - middle_s, (read_s - written_s) / 2)


def started_s(pid: int) -> float | None:
    """Return when a process of this host started, in ticks since boot; None where there is none, or
    only its status is left.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (
            None if fields[0] in _ENDED else float(fields[19])
        )  # state and starttime: proc_pid_stat(5)
    except (OSError, ValueError, IndexError):
        return None


def own_pid() -> tuple[int, float]:
    """Return this process, as it is known on its own host."""
    return os.getpid(), started_s(os.getpid()) or 0.0


def now_s() -> float:
    """Return this process's monotonic clock."""
    return time.monotonic()
