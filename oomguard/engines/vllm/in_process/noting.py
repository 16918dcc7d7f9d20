"""A file that is told what vLLM logs, where `oomguard run` started the command: its output may go where nobody reads it.

Standard library only: it is written in vLLM's own processes. The folder is there for as long as the attempt lasts.
"""

from __future__ import annotations

import os

_MOST_BYTES = 4 << 20
# Beyond this only what is more than information is noted: a server runs for weeks.
_MOST_INFORMATION_BYTES = 1 << 20
_INFORMATION = b'"level": "INFO"'


class Notes:
    """The file, as one process of the engine has it open; it takes what a socket would be sent."""

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)

    def sendall(self, row: bytes) -> None:
        """Add a row; raise OSError once the file is full, or cannot be written."""
        size = os.fstat(self._descriptor).st_size
        if size > _MOST_BYTES:
            raise OSError("enough is noted")
        if size <= _MOST_INFORMATION_BYTES or _INFORMATION not in row:
            os.write(self._descriptor, row)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
