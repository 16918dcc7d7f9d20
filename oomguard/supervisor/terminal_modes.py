"""A terminal's modes: raw or as its user had them, what was typed ahead, what a command leaves set,
its line ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import termios
from collections.abc import Callable
from typing import Any, Final, NamedTuple

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
    """Return modes in which every byte passes unchanged and is no key; what is printed is left to
    it with ``adds_returns``.
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


def without_lines(modes: Modes) -> Modes:
    """Return modes in which every key is handed on at once."""
    characters = list(modes[6])
    characters[termios.VMIN], characters[termios.VTIME] = 1, 0
    return [*modes[:3], modes[3] & ~termios.ICANON, *modes[4:6], characters]


def unseen(modes: Modes, flow: tuple[bytes, bytes] | None = None) -> Modes:
    """Return modes in which what is typed is not shown, edits no line and is no key; two bytes stop
    and start the output with ``flow``.
    """
    i = modes[0] & ~(termios.IXON | termios.IXANY)
    characters = list(modes[6])
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
    """Return modes for a job behind a shell, which edits a line meanwhile: of its own only whether
    such a job may print.
    """
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
_MAY_TYPE: Final = "/proc/sys/dev/tty/legacy_tiocsti"


def end_of_file(modes: Modes | None) -> bytes:
    """Return what is typed for the end of file on a terminal with these modes; a program that reads
    key by key gets a NUL alone, too.
    """
    if modes is not None and is_by_line(modes):
        return bytes(modes[6][termios.VEOF])
    return _NO_KEY


def typed_ahead(fd: int, modes: Modes, end: bytes) -> bytes:
    """Read the lines that wait in a terminal with these modes, ``end`` behind those that Ctrl-D has
    ended.
    """
    # A return is a key that came while the terminal was raw: no line holds one.
    ends = {b"\n", b"\r", modes[6][termios.VEOL], modes[6][termios.VEOL2]} - {_NO_KEY}
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    found = b""
    while is_by_line(modes) and poll.poll(0) == [
        (fd, select.POLLIN)
    ]:  # hung up, it has an end without end
        try:
            line = os.read(fd, _LINE_BYTES)
        except OSError:  # in the background since
            break
        found += line if line[-1:] in ends else line + end
    return found


def keys_ahead(fd: int) -> bytes:
    """Read what waits in a terminal that hands on each key; of one that did not until now, the line
    that was not ended.
    """
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
        with open(_MAY_TYPE, encoding="ascii") as file:
            return file.read().strip() != "0"
    except OSError:  # one that always does
        return True


def type_back(fd: int, data: bytes) -> None:
    """Type into our own terminal, for who reads there next; what the kernel forbids is lost."""
    try:
        for byte in data:
            fcntl.ioctl(fd, termios.TIOCSTI, bytes([byte]))
    except OSError:
        return


class Set(NamedTuple):
    """What a command set.

    Attributes:
        given: the modes that it began with.
        left: those that it ended with.
        size: that of the window, where it set another one.
    """

    given: Modes
    left: Modes
    size: bytes | None

    def on(self, modes: Modes) -> Modes:
        """Return modes with what was set."""
        flags = [
            m ^ ((m ^ left) & (given ^ left))
            for m, given, left in zip(modes[:4], self.given, self.left, strict=False)
        ]
        speeds = [
            left if left != given else m
            for m, given, left in zip(modes[4:6], self.given[4:], self.left[4:], strict=False)
        ]
        of_keys = zip(modes[6], self.given[6], self.left[6], strict=True)
        return [*flags, *speeds, [left if left != given else m for m, given, left in of_keys]]


class Lasting:
    """Keeps it while what is told of the run is shown on the terminal as its user had it."""

    def __init__(self) -> None:
        self._set: Set | None = None

    def note(self, what: Set | None) -> None:
        """Note what the command of the last attempt has set."""
        self._set = what

    def apply(self) -> None:
        """Set it on the terminal that controls us, where that is ours to set."""
        if self._set is None:
            return
        with contextlib.suppress(OSError):
            fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if os.tcgetpgrp(fd) == os.getpgrp():
                    self._apply(fd, self._set)
            finally:
                os.close(fd)

    @staticmethod
    def _apply(fd: int, what: Set) -> None:
        modes = read_modes(fd)
        if modes is not None and (wanted := what.on(modes)) != modes:
            set_modes(fd, wanted)
        if what.size is not None:
            fcntl.ioctl(fd, termios.TIOCSWINSZ, what.size)


# A carriage return and its newline come within microseconds; a progress bar's stands alone.
_PAIR_MS: Final = 2
_RETURN: Final = ord("\r")
# A terminal gives little at a time; so much is passed on together.
_AT_ONCE_BYTES: Final = 1 << 16


class LineEnds:
    """What a pseudo-terminal adds to the output, beside what the terminal that shows it adds.

    Args:
        pseudo: our end of the pseudo-terminal.
        shown_on: the terminal that gets the output: it is not raw while another job is in its
            foreground.
        follow: is told, before any output goes there, whether the pseudo-terminal adds carriage
            returns now.
    """

    def __init__(
        self, pseudo: int, shown_on: int, follow: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._pseudo = pseudo
        self._shown_on = shown_on
        self._follow = follow

    def read_on(self, fd: int, buffer: memoryview, count: int) -> int:
        """Read what else is there, and the newline that may follow a carriage return; return how
        much is in the buffer.
        """
        while 0 < count < _AT_ONCE_BYTES:
            try:
                more = os.readv(fd, [buffer[count:_AT_ONCE_BYTES]])
            except BlockingIOError:
                if buffer[count - 1] != _RETURN or not _comes(fd):
                    break
                continue
            except OSError:
                break  # the end, which the next read meets
            if not more:
                break
            count += more
        return count

    def split(self, data: memoryview) -> tuple[memoryview, memoryview]:
        """Return what the command printed, and what of it the terminal that shows it is to get."""
        are_added = adds_returns(read_modes(self._pseudo))
        self._follow(are_added)
        if not are_added:
            return data, data
        printed = memoryview(bytes(data).replace(b"\r\n", b"\n"))
        return printed, printed if adds_returns(read_modes(self._shown_on)) else data


def _comes(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(_PAIR_MS))
