"""Who holds a file, a socket or memory: the processes of this machine, each named by its id and its command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from oomguard.report.mask import mask_command
from oomguard.supervise.tree import pids

_PROC: Final = Path("/proc")
_SHOWN_CHARS: Final = 120
_SHOWN_HOLDERS: Final = 3


def named(pid: int) -> str:
    """Return a process's id and its command, the secrets in it masked."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        name = (_PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return f"pid {pid}"
    command = shlex.join(mask_command([word.decode(errors="replace") for word in words if word])) or f"[{name}]"
    return f"pid {pid} ({command if len(command) <= _SHOWN_CHARS else command[:_SHOWN_CHARS] + '…'})"


def listed(numbers: Sequence[int], has: Callable[[int], str] = lambda _: "") -> str:
    """Return several processes named, the first few of them, each with what it has."""
    shown = [f"{named(pid)}{has(pid)}" for pid in numbers[:_SHOWN_HOLDERS]]
    more = len(numbers) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])])


def with_open(is_wanted: Callable[[str], bool]) -> set[int]:
    """Return the processes that have something open of which ``is_wanted`` holds, as far as they may be read.

    It is asked what a descriptor leads to: a path, or ``socket:[number]``.
    """
    return {pid for pid, target in _open_files() if is_wanted(target)}


def in_use(paths: Iterable[str]) -> set[str]:
    """Return those of some files that a process, as far as it may be read, has open or mapped."""
    wanted = set(paths)
    found = {target for _, target in _open_files() if target in wanted}
    for pid in pids():
        try:
            lines = (_PROC / str(pid) / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        # Five fields stand before the path, which may hold spaces.
        found |= {path for line in lines if (path := line.split(None, 5)[-1].strip()) in wanted}
    return found


def _open_files() -> Iterator[tuple[int, str]]:
    for pid in pids():
        try:
            for link in (_PROC / str(pid) / "fd").iterdir():
                yield pid, str(link.readlink())
        except OSError:  # it has ended, or is another user's
            continue
