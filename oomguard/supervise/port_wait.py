"""Wait until a server's address is free: a start that finds it taken fails after it has loaded the model, or before."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from oomguard.engines.listening import Address
from oomguard.supervise.listeners import holders, listens_on_path

# A process that is ending has let go of its port by then; a service that runs keeps it.
LIMIT_S: Final = 10.0
_POLL_S: Final = 0.1


def wait_until_free(address: Address, stopped: Callable[[], bool], *, limit_s: float = LIMIT_S) -> str | None:
    """Wait until the address can be bound.

    Args:
        address: what the next attempt binds.
        stopped: asked while waiting; once true, waiting ends.
        limit_s: the longest wait.

    Returns who holds it after ``limit_s``, to read; None when it is free, and after a stop.
    """
    until_s = time.monotonic() + limit_s
    while is_taken(address) and not stopped():
        if time.monotonic() >= until_s:
            return _whose(address)
        time.sleep(_POLL_S)
    return None


def is_taken(address: Address) -> bool:
    """Return whether binding the address fails because it is in use.

    It is bound for a moment as uvicorn does, with SO_REUSEADDR: connections in TIME_WAIT are in nobody's way. vLLM with several
    API servers also sets SO_REUSEPORT, with which it would share the port, and so its requests, with a server that was left
    there: that one counts as a holder. Any other error is the engine's to tell.
    """
    if address.path is not None:
        return os.path.lexists(address.path)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    except (TypeError, ValueError):  # no name of a host, as bind() says it
        return False
    return False


def remove_left_socket(path: str) -> bool:
    """Remove the file of a Unix socket that nobody listens on; return whether it was one and is gone.

    The kernel leaves it where the server does not remove it, as vLLM, and then no server can bind the path again.
    """
    try:
        found = Path(path).lstat()
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid() or listens_on_path(path):
            return False
        Path(path).unlink()
    except OSError:
        return False
    return True


def _whose(address: Address) -> str:
    if address.path is None:
        return holders(address)
    try:
        is_socket = stat.S_ISSOCK(Path(address.path).lstat().st_mode)
    except OSError:
        is_socket = False
    if not is_socket:
        return "a file that is no socket"
    return holders(address) if listens_on_path(address.path) else "nobody: the file of a socket that was left behind"
