"""What tests and benchmarks of ``oomguard run`` share: how it is started, and what of it is left
anywhere.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

RUN = [sys.executable, "-m", "oomguard", "run"]
QUIET = [*RUN, "-q", "--"]
LIMIT_S = 120  # what a machine under load may take
MARK = "OOMGUARD_TEST_MARK"


def marked(mark: str, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment by which ``left`` knows all that a run starts."""
    return {**os.environ, **(env or {}), MARK: mark}


def left(mark: str) -> list[int]:
    """Return the processes, zombies aside, that carry the mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and wanted in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def wait_for(what: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    """Wait until it holds; return whether it did in time."""
    deadline = time.monotonic() + limit_s
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def state(pid: int) -> str:
    """Return the letter of a process's state, empty where it is gone."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def run(
    *options: str, command: tuple[str, ...], env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command under ``oomguard run`` with options, and return what both printed; ``env`` is
    added to the environment.
    """
    return subprocess.run(
        [*RUN, *options, "--", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **(env or {})},
    )


def hooked(folder: Path, code: str) -> dict[str, str]:
    """Return an environment in which each Python that oomguard runs in executes ``code`` as it
    starts.
    """
    hook = folder / "hook"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(code)
    path = os.pathsep.join([str(hook), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}
