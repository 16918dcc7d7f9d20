"""Read and set terminal modes: raw mode, typed-ahead input, line ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
from typing import Any, Final

# As in termios: iflag, oflag, cflag, lflag, two speeds, the characters.
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
_KEYS: Final = {termios.VINTR: signal.SIGINT, termios.VQUIT: signal.SIGQUIT}
# _POSIX_VDISABLE: a NUL turns a control character off.
_NO_KEY: Final = b"\0"


def read_modes(fd: int) -> Modes | None:
    """Return a terminal's modes; None if it is gone or is not a terminal."""
    try:
        return termios.tcgetattr(fd)
    except termios.error:
        return None


def set_modes(fd: int, modes: Modes) -> None:
    """Set a terminal's modes at once; no effect if it is gone."""
    with contextlib.suppress(termios.error):
        termios.tcsetattr(fd, termios.TCSANOW, modes)


def raw(modes: Modes, *, adds_returns: bool = False) -> Modes:
    """Return raw modes, in which every byte passes unchanged.

    With ``adds_returns`` the terminal still adds carriage returns to the output.
    """
    i, o, c, local, in_speed, out_speed, characters = modes
    c = (c & ~(termios.CSIZE | termios.PARENB)) | termios.CS8
    changed = list(characters)
    changed[termios.VMIN], changed[termios.VTIME] = 1, 0
    return [
        i & ~_IN,
        o if adds_returns else o & ~termios.OPOST,
        c,
        local & ~_LOCAL,
        in_speed,
        out_speed,
        changed,
    ]


def is_same(one: Modes, other: Modes) -> bool:
    """Return whether two modes treat the data in the same way."""
    return one[:2] == other[:2] and one[3] == other[3]


def adds_returns(modes: Modes | None) -> bool:
    """Return whether a terminal adds a carriage return before each printed newline."""
    return modes is not None and modes[1] & _RETURNS == _RETURNS


def is_by_line(modes: Modes | None) -> bool:
    """Return whether a terminal delivers whole lines, so that it processes its special keys."""
    return modes is not None and bool(modes[3] & termios.ICANON)


def for_background(modes: Modes, own: Modes) -> Modes:
    """Return modes for a background job; only its right to print comes from ``own``.

    The shell in the foreground edits a line meanwhile.
    """
    return [*modes[:3], (modes[3] & ~termios.TOSTOP) | (own[3] & termios.TOSTOP), *modes[4:]]


def echo_bytes(modes: Modes | None) -> int:
    """Return how many bytes a terminal echoes for a stop key."""
    if modes is None or not modes[3] & termios.ECHO:
        return 0
    # The terminal echoes ^C.
    return 2 if modes[3] & termios.ECHOCTL else 1


def stop_keys(data: bytes, modes: Modes | None) -> list[int]:
    """Return the stop signals that a terminal makes of typed bytes.

    A program that reads key by key (a line editor, a pager) gives these keys its own meaning.
    """
    if not is_by_line(modes) or modes is None or not modes[3] & termios.ISIG:
        return []
    keys = {}
    for at, number in _KEYS.items():
        if modes[6][at] != _NO_KEY:
            keys[modes[6][at]] = number
    if modes[3] & termios.IEXTEN:
        literal_next = modes[6][termios.VLNEXT]
    else:
        literal_next = _NO_KEY
    found = list[int]()
    is_literal = False
    for byte in (data[i : i + 1] for i in range(len(data))):
        if is_literal:
            is_literal = False
        elif byte == literal_next != _NO_KEY:
            is_literal = True
        elif byte in keys:
            found.append(int(keys[byte]))
    return found


_LINE_BYTES: Final = 1 << 16


def end_of_file(modes: Modes | None) -> bytes:
    """Return the bytes for end-of-file on a terminal; a NUL if it delivers key by key."""
    if modes is not None and is_by_line(modes):
        return bytes(modes[6][termios.VEOF])
    return _NO_KEY


def typed_ahead(fd: int, modes: Modes, end: bytes) -> bytes:
    """Read the lines that wait in a terminal, with ``end`` after those that Ctrl-D has ended."""
    # A carriage return is a key that came while the terminal was raw, because no line contains one.
    ends = {b"\n", b"\r", modes[6][termios.VEOL], modes[6][termios.VEOL2]} - {_NO_KEY}
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    found = b""
    # A terminal that hung up stays readable at its end forever, so the loop would never stop.
    while is_by_line(modes) and poll.poll(0) == [(fd, select.POLLIN)]:
        try:
            line = os.read(fd, _LINE_BYTES)
        except OSError:
            # We are in the background by now.
            break
        found += line if line[-1:] in ends else line + end
    return found


def keys_ahead(fd: int) -> bytes:
    """Read the waiting keys, or the unfinished line of a terminal that just left line mode."""
    found = b""
    try:
        while data := os.read(fd, _LINE_BYTES):
            found += data
    except OSError:
        # No key waits any more, or we are in the background by now.
        pass
    return found


# A carriage return and its newline come within microseconds; that of a progress bar comes alone.
_PAIR_MS: Final = 2
_RETURN: Final = ord("\r")
# A terminal delivers little at a time; up to this much is passed on together.
_AT_ONCE_BYTES: Final = 1 << 16


class LineEnds:
    """Undo the line ends that a pseudo-terminal adds, if the shown terminal adds them too.

    Args:
        pseudo: our end of the pseudo-terminal.
        shown_on: the terminal that gets the output; it is not raw while another job is in front.
    """

    def __init__(self, pseudo: int, shown_on: int) -> None:
        self._pseudo = pseudo
        self._shown_on = shown_on

    def read_on(self, fd: int, buffer: memoryview, count: int) -> int:
        """Read more available bytes, and the newline that may follow a carriage return.

        Returns:
            The number of bytes in the buffer.
        """
        while 0 < count < _AT_ONCE_BYTES:
            try:
                more = os.readv(fd, [buffer[count:_AT_ONCE_BYTES]])
            except BlockingIOError:
                if buffer[count - 1] != _RETURN or not _comes(fd):
                    break
                continue
            except OSError:
                # The next read finds the end.
                break
            if not more:
                break
            count += more
        return count

    def split(self, data: memoryview) -> tuple[memoryview, memoryview]:
        """Return the command's original output, and the bytes for the terminal that shows it."""
        if not adds_returns(read_modes(self._pseudo)):
            return data, data
        # The recording gets the newlines of the command, as if its output were a pipe.
        printed = memoryview(bytes(data).replace(b"\r\n", b"\n"))
        return printed, printed if adds_returns(read_modes(self._shown_on)) else data


def _comes(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(_PAIR_MS))
