"""One run of the command: started, watched, and ended with everything that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final

from oomguard.engines.command import Launch
from oomguard.errors import LaunchError
from oomguard.supervise.recording import Recording
from oomguard.supervise.signals import Signals, terminal_foreground
from oomguard.supervise.tee import Tee

DEFAULT_GRACE_S: Final = 30.0
KILL_WAIT_S: Final = 5.0
_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Exit:
    """How a run ended: ``status`` as a shell reports it (128 + n for a signal), and how long it ran."""

    status: int
    seconds: float


def become_subreaper() -> bool:
    """Adopt the command's orphans, so that none outlives oomguard; return False where that cannot be done (not Linux)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def run_once(launch: Launch, recording: Recording, signals: Signals, *, grace_s: float = DEFAULT_GRACE_S) -> Exit:
    """Run the command to its end, then end every process that it left.

    Args:
        launch: the command and what is added to its environment.
        recording: keeps a copy of the output, which goes on unchanged.
        signals: are handed on to the command while it runs.
        grace_s: time that the command has after a stop signal.

    Raises:
        LaunchError: the command cannot be started.
    """
    own_group = not terminal_foreground()
    started = time.monotonic()
    process = _start(launch, own_group=own_group)
    signals.attach(process.pid, own_group=own_group)
    try:
        tee = Tee(recording)
        assert process.stdout is not None and process.stderr is not None  # noqa: S101, PT018 - both are PIPE
        tee.add(process.stdout, 1)
        tee.add(process.stderr, 2)

        def check_grace() -> None:
            signals.send_again()
            late = signals.stopped_at_s is not None and time.monotonic() - signals.stopped_at_s > grace_s
            if (late or signals.count >= 3) and process.poll() is None:
                process.kill()

        tee.pump(lambda: process.poll() is not None, check_grace, lambda: signals.stopped_by is not None)
        while process.poll() is None:  # it closed its output and goes on
            check_grace()
            time.sleep(0.05)
    finally:
        signals.attach(None)
        if process.poll() is None:
            process.kill()
            process.wait()
        end_tree(process.pid if own_group else None)
    code = process.returncode
    return Exit(128 - code if code < 0 else code, time.monotonic() - started)


def _start(launch: Launch, *, own_group: bool) -> subprocess.Popen[bytes]:
    # Unbuffered: on SIGKILL a block-buffered child loses its last lines, the very ones that say why.
    env = {"PYTHONUNBUFFERED": "1", **os.environ, **launch.env}
    try:
        return subprocess.Popen(
            launch.argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            bufsize=0,
            process_group=0 if own_group else None,
        )
    except FileNotFoundError:
        raise LaunchError(f"{launch.argv[0]}: command not found", exit_status=127) from None
    except PermissionError:
        raise LaunchError(f"{launch.argv[0]}: cannot be executed", exit_status=126) from None
    except (OSError, ValueError) as error:
        raise LaunchError(f"{launch.argv[0]}: {error}", exit_status=126) from None


def end_tree(group: int | None) -> None:
    """End what a run left behind: its process group, then every process below this one (a subreaper adopts orphans)."""
    import psutil

    if group is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGTERM)
    left = psutil.Process().children(recursive=True)
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    _, alive = psutil.wait_procs(left, timeout=KILL_WAIT_S)
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(alive, timeout=KILL_WAIT_S)
