"""Run the analyst's process, which diagnoses the attempts of ``oomguard run``."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from typing import Final

from oomguard.analyst.link import Link, set_link
from oomguard.supervisor.signal_sets import STOPS
from oomguard.supervisor.tree import die_with_parent, set_name

# Limit of the process's own memory. Reading a long log takes far less.
_MOST_BYTES: Final = 4 << 30
# The supervisor alone decides what a signal means; the analyst ends with it.
_IGNORED: Final = (
    *STOPS,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGPIPE,
    # The supervisor passes these on to the command; sent to the whole group they reach us too.
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGIO,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)


def main(fd: int) -> None:
    """Serve the supervisor on a socket; end silently if the supervisor is gone."""
    link = Link(socket.socket(fileno=fd))
    _prepare()
    try:
        link.begin()
        set_link(link)
        link.say("end", status=_status(link))
    except BaseException as error:  # noqa: BLE001
        # Whatever failed here, the command's own status stands.
        if os.environ.get("OOMGUARD_TRACEBACKS"):
            import traceback

            traceback.print_exc()
        # The supervisor may be gone, and then the message has no receiver.
        with contextlib.suppress(BaseException):
            link.say("broken", reason=f"{type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(0)


def _prepare() -> None:
    """Leave signals to the supervisor, end together with it, and limit the memory."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    set_name("oomguard-analys")
    die_with_parent(os.getppid())
    # Without a limit the process still works, so no failure matters here.
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        # RLIM_INFINITY is -1, so it would win a plain min().
        least = min({soft, hard, _MOST_BYTES} - {resource.RLIM_INFINITY})
        resource.setrlimit(resource.RLIMIT_DATA, (least, hard))


def _status(link: Link) -> int | None:
    from oomguard.cli import run_group

    status = run_group(list(link.facts["words"]))
    if isinstance(status, int):
        return status
    return None
