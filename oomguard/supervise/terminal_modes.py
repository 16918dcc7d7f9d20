"""How a terminal treats what passes through it: as its user has it, or raw, where another terminal behind it does the work."""

from __future__ import annotations

import contextlib
import signal
import termios
from typing import Any, Final

# As termios has them: iflag, oflag, cflag, lflag, two speeds, the characters.
Modes = list[Any]

_IN: Final = (
    termios.IGNBRK
    | termios.BRKINT
    | termios.PARMRK
    | termios.ISTRIP
    | termios.INLCR
    | termios.IGNCR
    | termios.ICRNL
    | termios.IXON
)
_LOCAL: Final = termios.ECHO | termios.ECHONL | termios.ICANON | termios.ISIG | termios.IEXTEN
_RETURNS: Final = termios.OPOST | termios.ONLCR
_EDITING: Final = (termios.VERASE, termios.VKILL, termios.VWERASE, termios.VREPRINT, termios.VLNEXT)
_KEYS: Final = {termios.VINTR: signal.SIGINT, termios.VQUIT: signal.SIGQUIT}
_NO_KEY: Final = b"\0"  # this character is turned off


def read_modes(fd: int) -> Modes | None:
    """Return a terminal's modes; None where it is gone, or none."""
    try:
        return termios.tcgetattr(fd)
    except termios.error:
        return None


def set_modes(fd: int, modes: Modes) -> None:
    """Set a terminal's modes at once; one that is gone keeps none."""
    with contextlib.suppress(termios.error):
        termios.tcsetattr(fd, termios.TCSANOW, modes)


def raw(modes: Modes, *, adds_returns: bool = False) -> Modes:
    """Return modes in which every byte passes unchanged and is no key; what is printed is left to it with ``adds_returns``."""
    i, o, c, local, in_speed, out_speed, characters = modes
    c = (c & ~(termios.CSIZE | termios.PARENB)) | termios.CS8
    changed = list(characters)
    changed[termios.VMIN], changed[termios.VTIME] = 1, 0
    return [i & ~_IN, o if adds_returns else o & ~termios.OPOST, c, local & ~_LOCAL, in_speed, out_speed, changed]


def without_lines(modes: Modes) -> Modes:
    """Return modes in which every key is handed on at once."""
    characters = list(modes[6])
    characters[termios.VMIN], characters[termios.VTIME] = 1, 0
    return [*modes[:3], modes[3] & ~termios.ICANON, *modes[4:6], characters]


def unseen(modes: Modes, flow: tuple[bytes, bytes] | None = None) -> Modes:
    """Return modes in which what is typed is not shown, edits no line and is no key; two bytes stop and start the output with ``flow``."""
    i, characters = modes[0] & ~(termios.IXON | termios.IXANY), list(modes[6])
    for at in _EDITING:
        characters[at] = _NO_KEY
    if flow is not None:
        i |= termios.IXON
        characters[termios.VSTOP], characters[termios.VSTART] = flow
    local = modes[3] & ~(termios.ECHO | termios.ECHONL | termios.ISIG)
    return [i, *modes[1:3], local, *modes[4:6], characters]


def is_same(one: Modes, other: Modes) -> bool:
    """Return whether two modes treat what passes the same way."""
    return one[:2] == other[:2] and one[3] == other[3]


def adds_returns(modes: Modes | None) -> bool:
    """Return whether a terminal puts a carriage return before each newline that is printed."""
    return modes is not None and modes[1] & _RETURNS == _RETURNS


def is_by_line(modes: Modes | None) -> bool:
    """Return whether a terminal hands on whole lines, so that its keys are nobody else's."""
    return modes is not None and bool(modes[3] & termios.ICANON)


def for_background(modes: Modes, own: Modes) -> Modes:
    """Return modes for a job behind a shell, which edits a line meanwhile: of its own only whether such a job may print."""
    return [*modes[:3], (modes[3] & ~termios.TOSTOP) | (own[3] & termios.TOSTOP), *modes[4:]]


def echo_bytes(modes: Modes | None) -> int:
    """Return how many bytes a terminal shows of a stop key."""
    if modes is None or not modes[3] & termios.ECHO:
        return 0
    return 2 if modes[3] & termios.ECHOCTL else 1  # ^C


def stop_keys(data: bytes, modes: Modes | None) -> list[int]:
    """Return the signals that a terminal makes of typed bytes, of those that ask to stop.

    A program that reads key by key (a line editor, a pager) means something of its own by them.
    """
    if not is_by_line(modes) or modes is None or not modes[3] & termios.ISIG:
        return []
    keys = {modes[6][at]: number for at, number in _KEYS.items() if modes[6][at] != _NO_KEY}
    literal_next = modes[6][termios.VLNEXT] if modes[3] & termios.IEXTEN else _NO_KEY
    found, is_literal = list[int](), False
    for byte in (data[i : i + 1] for i in range(len(data))):
        if is_literal:
            is_literal = False
        elif byte == literal_next != _NO_KEY:
            is_literal = True
        elif byte in keys:
            found.append(int(keys[byte]))
    return found
