"""Handle a run inside another run: the outer run retries, and the inner one only diagnoses."""

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
    """Return the process of the outer run; None without one.

    The variable may also name a run that is not above this process; that returns None too.
    """
    named = os.environ.get(OUTER, "")
    pid = os.getpid()
    below = 0
    # The variable survives in detached processes, so only an ancestor counts as the outer run.
    while pid > 1:
        pid, below = tree.parent(pid) or 0, pid
        # Every process of a run is below its reaper.
        if str(pid) == named:
            if tree.name_of(below) == REAPER_NAME:
                return pid
            return None
    return None


def log_exhausted(attempts: int, policy: Policy, *, is_time_over: bool) -> None:
    """Log why no relaunch is left: the deadline, the limit, or an outer run that does them."""
    if policy.max_attempts == 1 and outer_run() is not None:
        get_logger().info("Another oomguard run is around this one and does the relaunches")
        return
    if is_time_over:
        fields: dict[str, Any] = {"attempts": attempts, "deadline_s": policy.deadline_s}
        get_logger().warning("Not retried: the deadline has passed", **fields)
    else:
        get_logger().warning(
            "Not retried: the limit of attempts is reached",
            attempts=attempts,
            max_attempts=policy.max_attempts,
        )


def innermost_command(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that nested runs finally start; any other command unchanged."""
    if _is_run(argv):
        return innermost_command(argv[argv.index("--") + 1 :])
    return argv


def options_of_inner_runs(argv: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the words before ``--`` of each run in a command, outermost first."""
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


def unwrap_command(argv: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the commands that really run, without runs, wrappers and shells around them."""
    for inner in inner_commands(innermost_command(argv)):
        module = inner.program.removeprefix("module:")
        begins = (inner.program,) if module == inner.program else ("python", "-m", module)
        yield (*begins, *inner.args)
