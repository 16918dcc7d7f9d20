"""The terminal that oomguard set is set back by its watcher, unless its user's shell was first.

Tried without processes: a hangup continues who leads the terminal's session, so that no watcher can be kept stopped through it.
"""

from __future__ import annotations

import os
import pty
import subprocess

import pytest

from oomguard.supervisor.reaper_process import TerminalBackup
from oomguard.supervisor.terminal_modes import Modes, raw, read_modes, set_modes


@pytest.fixture
def terminal():
    """Yield a terminal's descriptor."""
    master, slave = pty.openpty()
    yield slave
    os.close(slave)
    os.close(master)


def lent(terminal: int) -> tuple[TerminalBackup, Modes]:
    """Return what the watcher notes of a terminal that oomguard then makes raw, and the modes before."""
    saved = read_modes(terminal)
    assert saved is not None
    noted = TerminalBackup()
    noted.note([os.dup(terminal)], saved, raw(saved))
    set_modes(terminal, raw(saved))
    return noted, saved


def test_a_terminal_that_is_as_oomguard_left_it_is_set_back(terminal):
    noted, saved = lent(terminal)
    assert read_modes(terminal) != saved
    noted.restore()
    assert read_modes(terminal) == saved


def test_settings_of_the_shell_are_not_undone_by_the_watcher(terminal):
    """A shell that restores and edits a line at once, before the watcher comes round."""
    noted, saved = lent(terminal)
    subprocess.run(["stty", "-F", os.ttyname(terminal), "sane", "-echo"], check=True)
    set_since = read_modes(terminal)
    noted.restore()
    assert read_modes(terminal) == set_since != saved
