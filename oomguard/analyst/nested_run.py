"""A run inside another run: the outer one changes and runs again, the inner one only diagnoses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from oomguard.core.log import get_logger
from oomguard.engines.unwrap_command import inner_commands
from oomguard.remedy.policy import Policy
from oomguard.supervisor import tree
from oomguard.supervisor.process import OUTER
from oomguard.supervisor.reaper_process import REAPER_NAME


def outer_run() -> int | None:
    """Return the process of the run around this one; None without one, or where the variable names
    a run that we are not below.
    """
    named = os.environ.get(OUTER, "")
    pid = os.getpid()
    below = 0
    while pid > 1:
        pid, below = tree.parent(pid) or 0, pid
        if str(pid) == named:  # what is below a run is below its reaper
            if tree.name_of(below) == REAPER_NAME:
                return pid
            return None
    return None


def tell_exhausted(attempts: int, policy: Policy, *, is_time_over: bool) -> None:
    """Log that no relaunch is left, for the time or for the count, or that another run
    makes them.
    """
    if policy.max_relaunches == 0 and outer_run() is not None:
        get_logger().info("inside another run: that one changes and runs again")
        return
    if is_time_over:
        told: dict[str, Any] = {"attempts": attempts, "deadline_s": policy.deadline_s}
        get_logger().warning("no relaunch is left: the deadline has passed", **told)
    else:
        get_logger().warning(
            "no relaunch is left", attempts=attempts, max_relaunches=policy.max_relaunches
        )


def innermost(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that a run inside a run starts in the end; any other command as it is."""
    if _is_run(argv):
        return innermost(argv[argv.index("--") + 1 :])
    return argv


def options_of_inner_runs(argv: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the words before ``--`` of each run that a command is, from the outside."""
    while _is_run(argv):
        at = argv.index("--")
        yield argv[:at]
        argv = argv[at + 1 :]


def _is_run(argv: tuple[str, ...]) -> bool:
    names = tuple(PurePath(word).name for word in argv[:4])
    by_python = (
        len(names) == 4 and names[0].startswith("python") and names[1:] == ("-m", "oomguard", "run")
    )
    return "--" in argv[:-1] and (names[:2] == ("oomguard", "run") or by_python)


def unwrapped(argv: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the commands that run in the end, each as one that nothing is around: no run, wrapper
    or shell.
    """
    for inner in inner_commands(innermost(argv)):
        module = inner.program.removeprefix("module:")
        begins = (inner.program,) if module == inner.program else ("python", "-m", module)
        yield (*begins, *inner.args)
