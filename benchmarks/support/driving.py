"""A terminal that a test sits at: it starts a program there, types, and has every byte that was
shown.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from support.supervising import LIMIT_S, wait_for

SIZE = (24, 80)
CTRL_C = b"\x03"
LOOK_S = 0.03
QUIET_LOOKS = 5
_TIOCGPTN = 0x80045430  # asm-generic/ioctls.h


class Terminal:
    """A terminal, the program that leads its session, and what it has shown."""

    def __init__(self, master: int, leader: int) -> None:
        self.master = master
        self.leader = leader
        self.shown = b""
        self._at = 0

    def type(self, text: bytes) -> None:
        """Press keys."""
        os.write(self.master, text)

    def settle(self) -> None:
        """Wait until nothing that runs here has used any time for a while: it waits for keys."""
        deadline = time.monotonic() + LIMIT_S
        quiet = 0
        before = ()
        while quiet < QUIET_LOOKS:
            assert time.monotonic() < deadline, "it does not settle"
            time.sleep(LOOK_S)
            now = tuple(sorted(self._times()))
            quiet = quiet + 1 if now == before else 0
            before = now

    def _times(self) -> Iterator[tuple[int, float]]:
        for process in [
            *psutil.Process(self.leader).children(recursive=True),
            psutil.Process(self.leader),
        ]:
            with suppress(psutil.NoSuchProcess):
                yield process.pid, sum(process.cpu_times()[:2])

    def until(self, pattern: bytes) -> re.Match[bytes]:
        """Read until it is shown behind what the last call found."""
        deadline = time.monotonic() + LIMIT_S
        while (found := re.compile(pattern).search(self.shown, self._at)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.shown[self._at :]!r}"
            assert self._read(), f"ended before {pattern!r}: {self.shown[self._at :]!r}"
        self._at = found.end()
        return found

    def end(self) -> bytes:
        """Read until the session has ended; return all that was shown."""
        deadline = time.monotonic() + LIMIT_S
        while self._read():
            assert time.monotonic() < deadline, f"it has not ended: {self.shown[self._at :]!r}"
        return self.shown

    def _read(self) -> bool:
        if not select.select([self.master], [], [], 0.5)[0]:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        self.shown += data
        return bool(data)

    @property
    def name(self) -> str:
        """The file that it is."""
        (number,) = struct.unpack("i", fcntl.ioctl(self.master, _TIOCGPTN, bytes(4)))
        return f"/dev/pts/{number}"

    @property
    def modes(self) -> list[object]:
        """How the terminal treats what passes: flags, then characters."""
        i, o, c, local, _, _, characters = termios.tcgetattr(self.master)
        return [i, o, c, local, characters]

    @property
    def is_raw(self) -> bool:
        """Whether each key goes through as it is."""
        return not termios.tcgetattr(self.master)[3] & (
            termios.ISIG | termios.ICANON | termios.ECHO
        )

    def becomes_raw(self) -> None:
        """Wait until it is."""
        assert wait_for(lambda: self.is_raw)

    def resize(self, rows: int, columns: int) -> None:
        """Give the window another size."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextmanager
def sitting_at(
    argv: Iterable[str], *, env: dict[str, str] | None = None, folder: Path | None = None
) -> Iterator[Terminal]:
    """Start a program as the leader of a terminal's session; end all of it."""
    leader, master = pty.fork()
    if leader == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
        if folder is not None:
            os.chdir(folder)
        words = list(argv)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(words[0], words, {**os.environ, "TERM": "xterm", **(env or {})})
    terminal = Terminal(master, leader)
    try:
        yield terminal
    finally:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(leader).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        with suppress(ProcessLookupError):
            os.kill(leader, signal.SIGKILL)
        os.waitpid(leader, 0)
        os.close(master)


@contextmanager
def shell(folder: Path | None = None) -> Iterator[Terminal]:
    """A real bash with job control, at its prompt ``$ ``."""
    argv = ["bash", "--norc", "--noprofile", "-i"]
    env = {"PS1": "PROMPT> ", "INPUTRC": "/dev/null", "BASH_SILENCE_DEPRECATION_WARNING": "1"}
    with sitting_at(argv, env=env, folder=folder) as terminal:
        terminal.until(b"PROMPT> ")
        yield terminal


def transcript(
    argv: Iterable[str], keys: Iterable[tuple[bytes, bytes]] = (), folder: Path | None = None
) -> bytes:
    """Return every byte that a program shows on a terminal; each of ``keys`` is typed once its
    pattern is shown.
    """
    with sitting_at(argv, folder=folder) as terminal:
        for pattern, typed in keys:
            terminal.until(pattern)
            # Between its prompt and its wait for keys Python's line editor loses one until the next
            # key.
            if typed == CTRL_C:
                terminal.settle()
            terminal.type(typed)
        return terminal.end()
