"""The processes of an engine below its server, by the titles that they give themselves: their
states, and the CPU time they took.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oomguard.supervisor import tree

_PROC: Final = Path("/proc")
_TICKS_A_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """What /proc tells of them.

    Attributes:
        cores: the processes whose loop takes the engine's steps.
        stopped: cores that a signal has stopped.
        cpu_s: CPU time of cores and workers, since they began.
    """

    cores: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    cpu_s: float = 0.0


def engine_processes(root: int, titles: dict[str, Any]) -> EngineProcesses:
    """Return the engine's processes below ``root``; none where they have no titles, or /proc says
    nothing.
    """
    cores: list[int] = []
    cpu_s = 0.0
    for pid in tree.descendants(root):
        title = _title(pid)
        if _is(title, titles["core"]):
            cores.append(pid)
        elif not _is(title, titles["others"]):
            continue
        cpu_s += cpu_of(pid)
    return EngineProcesses(tuple(cores), tuple(pid for pid in cores if tree.is_stopped(pid)), cpu_s)


def cpu_of(pid: int) -> float:
    """Return the CPU seconds that a process took itself; 0 where it is gone."""
    try:
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_A_S
    except (OSError, IndexError, ValueError):
        return 0.0


def _is(title: str, endings: Sequence[str]) -> bool:
    return any(ending in title for ending in endings)


def _title(pid: int) -> str:
    """Return the first word of a process's command line: a title takes its place."""
    try:
        return (
            (_PROC / str(pid) / "cmdline")
            .read_bytes()
            .split(b"\0", 1)[0]
            .decode("utf-8", "replace")
        )
    except OSError:
        return ""
