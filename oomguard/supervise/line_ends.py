"""The carriage return that a terminal adds before each newline, taken out again where it would be added twice, or kept."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import Final

from oomguard.supervise.terminal_modes import adds_returns, read_modes

# A carriage return and its newline come within microseconds; a progress bar's stands alone.
_PAIR_MS: Final = 2
_RETURN: Final = ord("\r")
# A terminal gives little at a time; so much is passed on together.
_AT_ONCE_BYTES: Final = 1 << 16


class LineEnds:
    """What a pseudo-terminal adds to the output, beside what the terminal that shows it adds.

    Args:
        pseudo: our end of the pseudo-terminal.
        shown_on: the terminal that gets the output: it is not raw while another job is in its foreground.
        follow: is told, before any output goes there, whether the pseudo-terminal adds carriage returns now.
    """

    def __init__(self, pseudo: int, shown_on: int, follow: Callable[[bool], None] = lambda _: None) -> None:
        self._pseudo, self._shown_on, self._follow = pseudo, shown_on, follow

    def read_on(self, fd: int, buffer: memoryview, count: int) -> int:
        """Read what else is there, and the newline that may follow a carriage return; return how much is in the buffer."""
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
