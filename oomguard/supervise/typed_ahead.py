"""What was typed and not read: whole lines, the Ctrl-D that ends one, which a raw terminal makes a NUL, and a line that is not ended."""

from __future__ import annotations

import fcntl
import os
import select
import termios
from pathlib import Path
from typing import Final

from oomguard.supervise.terminal_modes import Modes, is_by_line, set_modes, without_lines

_LINE_BYTES: Final = 1 << 16
_NO_KEY: Final = b"\0"
_MAY_TYPE = Path("/proc/sys/dev/tty/legacy_tiocsti")


def end_of_file(modes: Modes | None) -> bytes:
    """Return what is typed for the end of file on a terminal with these modes; a program that reads key by key gets a NUL alone, too."""
    return modes[6][termios.VEOF] if modes is not None and is_by_line(modes) else _NO_KEY


def typed_ahead(fd: int, modes: Modes, end: bytes) -> bytes:
    """Read the lines that wait in a terminal with these modes, ``end`` behind those that Ctrl-D has ended."""
    # A return is a key that came while the terminal was raw: no line holds one.
    ends = {b"\n", b"\r", modes[6][termios.VEOL], modes[6][termios.VEOL2]} - {_NO_KEY}
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


def keys_ahead(fd: int) -> bytes:
    """Read what waits in a terminal that hands on each key; of one that did not until now, the line that was not ended."""
    found = b""
    try:
        while data := os.read(fd, _LINE_BYTES):
            found += data
    except OSError:  # nothing more, or in the background since
        pass
    return found


def left_unread(fd: int, modes: Modes, end: bytes) -> bytes:
    """Read all that waits in a terminal with these modes, which hands on each key afterwards."""
    found = typed_ahead(fd, modes, end)
    set_modes(fd, without_lines(modes))
    return found + keys_ahead(fd)


def may_type_back() -> bool:
    """Return whether the kernel lets a process type into its own terminal, as far as it says."""
    try:
        return _MAY_TYPE.read_text().strip() != "0"
    except OSError:  # one that always does
        return True


def type_back(fd: int, data: bytes) -> None:
    """Type into our own terminal, for who reads there next; what the kernel forbids is lost."""
    try:
        for byte in data:
            fcntl.ioctl(fd, termios.TIOCSTI, bytes([byte]))
    except OSError:
        return
