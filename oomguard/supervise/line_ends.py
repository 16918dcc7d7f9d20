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


class LineEnds:
    """What a pseudo-terminal adds to the output, beside what the terminal that shows it adds.

    Args:
        pseudo: our end of the pseudo-terminal.
        shown_on: the terminal that gets the output: it is not raw while another job is in its foreground.
        follow: is told, before any output goes there, whether the pseudo-terminal adds carriage returns now.
    """

    def __init__(self, pseudo: int, shown_on: int, follow: Callable[[bool], None] = lambda _: None) -> None:
        self._pseudo, self._shown_on, self._follow = pseudo, shown_on, follow

    def complete(self, fd: int, buffer: memoryview, count: int) -> int:
        """Read on where a carriage return was read last and its newline may follow; return how much is in the buffer."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while 0 < count < len(buffer) and buffer[count - 1] == _RETURN:
            if not any(event & select.POLLIN for _, event in poll.poll(_PAIR_MS)):
                break
            try:
                count += os.readv(fd, [buffer[count : count + 1]])
            except OSError:
                break  # the end, which the next read meets
        return count

    def split(self, data: memoryview) -> tuple[memoryview, memoryview]:
        """Return what the command printed, and what of it the terminal that shows it is to get."""
        are_added = adds_returns(read_modes(self._pseudo))
        self._follow(are_added)
        if not are_added:
            return data, data
        printed = memoryview(bytes(data).replace(b"\r\n", b"\n"))
        return printed, printed if adds_returns(read_modes(self._shown_on)) else data
