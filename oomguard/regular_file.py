"""Reading a file that a stranger may have put there: regular files only, up to a stated number of bytes, and without waiting.

A device may never end, a FIFO waits for somebody who writes, and a link leads to either. This file imports nothing from the package.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

_KINDS: Final[tuple[tuple[Callable[[int], bool], str], ...]] = (
    (stat.S_ISDIR, "is a folder"),
    (stat.S_ISFIFO, "is a FIFO"),
    (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
)
# Of a file that has no size, or has grown since it was asked for.
_STEP_BYTES: Final = 1 << 16


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: it cannot be opened or is of another kind; ``strerror`` says which.
    """
    # Looked at before it is opened, since opening a device may do something, and again once it is open.
    try:
        _check(Path(path).stat().st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # a null byte in the name
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        _check(os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: the file, or a link to it.
        most_bytes: the bytes that it may have.

    Raises:
        OSError: it cannot be read, is of another kind, or is longer; ``strerror`` says which.
    """
    with open_regular(path) as stream:
        # A file of a kernel's file system has no size, and any other may grow: what counts is what is read.
        size_bytes = os.fstat(stream.fileno()).st_size
        content = _read(stream, size_bytes, most_bytes) if size_bytes <= most_bytes else None
    if content is None or len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"is larger than {most_bytes} bytes")
    return content


def _read(stream: IO[bytes], size_bytes: int, most_bytes: int) -> bytes:
    """Return what is in a file, one byte more than ``most_bytes`` at most; asked for at once, so much would be allocated."""
    content = stream.read(min(size_bytes, most_bytes) + 1)
    while len(content) <= most_bytes and (more := stream.read(min(_STEP_BYTES, most_bytes + 1 - len(content)))):
        content += more
    return content


def _check(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "is of a kind that cannot be read")
        raise OSError(errno.EINVAL, f"{kind}, not a file")
