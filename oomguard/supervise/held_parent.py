"""The command is stopped while oomguard is: nobody can catch STOP, so that nobody hands it on.

Looked for from time to time: no process is told that its parent has stopped.
"""

from __future__ import annotations

import signal
from typing import Final

from oomguard.supervise import tree

LOOK_MS: Final = 200


class HeldParent:
    """Hold a command as its watcher's parent is held.

    Args:
        parent: oomguard.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self.holds = False

    def look(self, command: int) -> None:
        """Stop the command where oomguard is stopped, and continue what was stopped so: its whole group where it leads one."""
        is_held = tree.is_stopped(self._parent)
        if is_held == self.holds or (is_held and tree.is_stopped(command)):
            return
        self.holds = is_held
        tree.send(tree.job_of(command), signal.SIGSTOP if is_held else signal.SIGCONT)

    def is_over(self) -> None:
        """Note that the command goes on: somebody has continued oomguard, which has handed it on."""
        self.holds = False
