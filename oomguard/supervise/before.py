"""How oomguard was started, which is how the command starts."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Before:
    """Masked and ignored signals, and closed standard streams, as oomguard found them."""

    masked: frozenset[int]
    ignored: frozenset[int]
    closed: frozenset[int]

    def ignored_by(self, *, is_job: bool) -> frozenset[int]:
        """Return the signals that the command ignores.

        A job of a terminal of its own stops where it reads from behind, and is brought to the front. A shell's ``$(…)`` and a pane of
        tmux ignore that signal, and the read would fail.
        """
        return self.ignored - {signal.SIGTTIN} if is_job else self.ignored
