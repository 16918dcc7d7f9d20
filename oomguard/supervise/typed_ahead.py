"""What was typed before a command had its terminal: whole lines, and the Ctrl-D that ends one, which a raw terminal makes a NUL."""

from __future__ import annotations

import os
import select
import termios
from typing import Final

from oomguard.supervise.terminal_modes import Modes, is_by_line

_LINE_BYTES: Final = 1 << 16
_NO_KEY: Final = b"\0"


def end_of_file(modes: Modes | None) -> bytes:
    """Return what is typed for the end of file on a terminal with these modes; a program that reads key by key gets a NUL alone, too."""
    return modes[6][termios.VEOF] if modes is not None and is_by_line(modes) else _NO_KEY


def typed_ahead(fd: int, modes: Modes, end: bytes) -> bytes:
    """Read the lines that wait in a terminal with these modes, ``end`` behind those that Ctrl-D has ended."""
    ends = {b"\n", modes[6][termios.VEOL], modes[6][termios.VEOL2]} - {_NO_KEY}
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    found = b""
    while is_by_line(modes) and poll.poll(0) == [(fd, select.POLLIN)]:  # hung up, it has an end without end
        try:
            line = os.read(fd, _LINE_BYTES)
        except OSError:  # in the background since
            break
        found += line if line[-1:] in ends else line + end
    return found
