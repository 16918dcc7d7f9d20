"""Becoming a program as a shell does: looked up in PATH, and a script without ``#!`` run by /bin/sh."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Mapping
from typing import Final, NoReturn

_SHELL: Final = b"/bin/sh"
_LOOKED_AT_BYTES: Final = 256
_ELF: Final = b"\x7fELF"  # of another machine, or cut short
_STOPPED_MS: Final = 20
# With these systemd names the process for which its sockets, its watchdog and its journal are: the command.
_OF_A_SERVICE: Final = frozenset({b"LISTEN_PID", b"WATCHDOG_PID", b"SYSTEMD_EXEC_PID"})


def execute(argv: list[bytes], env: Mapping[bytes, bytes]) -> NoReturn:
    """Become the command.

    Raises:
        OSError: what stood in the way; of several folders in PATH the first that had such a file.
    """
    failure: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for path in _candidates(argv[0], env):
        try:
            _become(path, argv, env)
        except (FileNotFoundError, NotADirectoryError):  # the next folder of PATH may have it
            if b"/" in argv[0]:
                raise
        except PermissionError as error:
            failure = error
    raise failure


def for_this_process(env: Mapping[bytes, bytes], named: int) -> dict[bytes, bytes]:
    """Return the environment with what systemd gave to the process ``named`` given to the calling one."""
    ours, theirs = str(os.getpid()).encode(), str(named).encode()
    return {name: ours if name in _OF_A_SERVICE and value == theirs else value for name, value in env.items()}


def read_failure(told: int, pid: int) -> bytes:
    """Wait until a child has become the command, and return nothing, or the number of the error that it told instead.

    A child that is stopped on the way (Ctrl-Z) counts as the command: it goes on when it is continued.
    """
    poll = select.poll()
    poll.register(told, select.POLLIN)
    while not poll.poll(_STOPPED_MS):
        try:
            if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
                return b""
        except ChildProcessError:  # it has ended, and cannot stop any more
            break
    return os.read(told, 16)  # nothing: the pipe closed because the command took over


def _candidates(name: bytes, env: Mapping[bytes, bytes]) -> list[bytes]:
    if not name or b"/" in name:
        return [name] if name else []
    folders = env.get(b"PATH", os.fsencode(os.defpath)).split(b":")
    return [folder + b"/" + name if folder else name for folder in folders]


def _become(path: bytes, argv: list[bytes], env: Mapping[bytes, bytes]) -> NoReturn:
    try:
        os.execve(path, argv, env)  # noqa: S606
    except OSError as error:
        if error.errno != errno.ENOEXEC or _is_binary(path):
            raise
        # POSIX asks this of execvp: text that the kernel does not know is the shell's.
        os.execve(_SHELL, [b"sh", path, *argv[1:]], env)  # noqa: S606


def _is_binary(path: bytes) -> bool:
    with open(path, "rb") as file:  # noqa: PTH123 - its name may be no text
        start = file.read(_LOOKED_AT_BYTES)
    return b"\0" in start or start.startswith(_ELF)
