"""Start and talk to the analyst, the second process, which may fail at any time.

Messages are JSON lines on a socket, each an object with ``say``. The supervisor waits at most
``LIMIT_S`` after the last message. It kills an analyst that breaks the protocol.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from typing import Any, Final

from oomguard.supervisor import tree
from oomguard.supervisor.failsafe import beat

LIMIT_S: Final = 30.0
# After a stop signal the run must end within two seconds.
STOPPED_S: Final = 1.2
TYPED_S: Final = 10.0
_READ_BYTES: Final = 1 << 16
_MOST_BYTES: Final = 1 << 24
_FOLDER: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Python gets this as text, because the package's files may change or disappear meanwhile.
_BOOT: Final = """
import os, sys
try:
    sys.path[:] = [entry for entry in sys.path if os.path.isabs(entry)]
    import importlib.util
    folder = sys.argv[1]
    init = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(
        "oomguard", init, submodule_search_locations=[folder]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["oomguard"] = package
    spec.loader.exec_module(package)
    from oomguard.cli.analyst import main
    main(int(sys.argv[2]))
except BaseException as error:
    if os.environ.get("OOMGUARD_TRACEBACKS"):
        raise
    os._exit(70)
"""
_CODE_FOLDERS: Final = ("PYTHONPATH", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX")


class AnalystProcess:
    """Start the analyst, exchange messages with it, and stop it.

    Args:
        facts: the first message to it.
        output: the descriptor of the recorded output.

    Attributes:
        failed: why it is no longer used; None while it works.
        pid: its process; None before the start.
    """

    def __init__(self, facts: dict[str, Any], output: int) -> None:
        self._facts = facts
        self._output = output
        self._socket: socket.socket | None = None
        self.pid: int | None = None
        self._received = b""
        self.failed: str | None = None

    @property
    def runs(self) -> bool:
        """Whether it was started and has not failed."""
        return self._socket is not None

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message arrives; -1 without one."""
        if self._socket is None:
            return -1
        return self._socket.fileno()

    def start(self) -> None:
        """Start it; ``failed`` says why if that is impossible."""
        if self.runs or self.failed is not None:
            return
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            theirs.set_inheritable(True)
            os.set_inheritable(self._output, True)
            flags = [
                flag
                for flag, on in (
                    ("-E", sys.flags.ignore_environment),
                    ("-s", sys.flags.no_user_site),
                )
                if on
            ]
            words = [sys.executable, "-P", *flags, "-c", _BOOT, _FOLDER, str(theirs.fileno())]
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            try:
                self.pid = os.posix_spawn(
                    sys.executable,
                    words,
                    _safe_environment(),
                    file_actions=[(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, 2, 1)],
                    setsigmask=[],
                    setsigdef=[],
                )
            finally:
                os.close(null)
                os.set_inheritable(self._output, False)
            self._socket = ours
            self.send(say="facts", **self._facts, output=self._output)
        except (OSError, ValueError) as error:
            ours.close()
            self.fail(f"it could not be started: {error}")
        finally:
            theirs.close()

    def send(self, **message: Any) -> None:
        """Send a message. An analyst that does not accept it in time has failed."""
        if self._socket is None:
            return
        import json  # many runs need no analyst

        data = memoryview(json.dumps(message).encode() + b"\n")
        until_s = time.monotonic() + LIMIT_S
        try:
            while data:
                beat()
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                if poll.poll(500):
                    data = data[self._socket.send(data) :]
                elif time.monotonic() > until_s:
                    self.fail(f"it accepted no message for {LIMIT_S:.0f} s")
                    return
        except OSError:
            self.fail("it has ended")

    def messages(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return its new messages; wait at most ``timeout_s`` seconds for the first.

        An analyst that has ended, or that sends an invalid message, has failed.
        """
        if self._socket is None:
            return []
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            return []
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        import json

        self._received += data
        *lines, self._received = self._received.split(b"\n")
        found: list[dict[str, Any]] = []
        try:
            found = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            self.fail("its answer is invalid")
        if not all(isinstance(one, dict) and isinstance(one.get("say"), str) for one in found):
            self.fail("its answer is invalid")
            return []
        if len(self._received) > _MOST_BYTES:
            self.fail("its answer is too long")
        if not data and not found:
            self.fail("it ended without an answer")
        return found

    def fail(self, why: str) -> None:
        """Record why it is no longer used, and stop it."""
        self.failed = self.failed or why
        self.end()

    def end(self, wait_s: float = 0.0) -> None:
        """Kill it and its children; ``wait_s`` seconds are left for it to end on its own."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.pid is None:
            return
        until_s = time.monotonic() + wait_s
        while not self._has_ended():
            beat()
            if time.monotonic() >= until_s:
                for pid in (self.pid, *tree.descendants(self.pid)):
                    tree.send(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self.pid, 0)
                break
            time.sleep(0.005)
        self.pid = None

    def _has_ended(self) -> bool:
        try:
            return os.waitpid(self.pid or 0, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True


def _safe_environment() -> dict[str, str]:
    """Return our variables without entries that mean the working directory.

    The analyst must not load code from there.
    """
    variables = dict(os.environ)
    for name in _CODE_FOLDERS:
        kept = [
            entry for entry in variables.pop(name, "").split(os.pathsep) if os.path.isabs(entry)
        ]
        if kept:
            variables[name] = os.pathsep.join(kept)
    return {**variables, "PYTHONSAFEPATH": "1"}
