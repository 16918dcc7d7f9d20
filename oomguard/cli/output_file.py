"""Where a command writes what it found: standard output, or a file that is cut back to what was written whole."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from oomguard.errors import UsageError
from oomguard.observe.source import shown


@contextlib.contextmanager
def sink(output: str | None, inputs: list[str], form: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes text out at once; raises UsageError for a file that cannot be written."""
    to_file = output is not None and output != "-"
    standard = sys.stdout.buffer if sys.stdout is not None else None
    stream = _opened(str(output), inputs) if to_file else standard
    # What other programs read is UTF-8 whatever the terminal speaks; a name's undecodable bytes become \udcNN, which
    # is how JSON writes them too.
    encoding = "utf-8" if to_file or form != "terminal" or sys.stdout is None else sys.stdout.encoding

    whole_bytes = 0

    def write(text: str) -> None:
        nonlocal whole_bytes
        if not text or stream is None:
            return
        left = memoryview(text.encode(encoding, "backslashreplace"))
        size_bytes = len(left)
        try:
            while left:
                left = left[stream.write(left) :]
            stream.flush()
        except OSError as error:
            if not to_file:
                raise
            _cut_back(str(output), 0 if form == "html" else whole_bytes)  # half a page tells nothing
            reason = error.strerror or error
            raise UsageError(
                f"--output {shown(str(output))}: {reason}", hint="name a file where there is room"
            ) from None
        whole_bytes += size_bytes

    try:
        yield write
    finally:
        if to_file and stream is not None:
            stream.close()


def _cut_back(output: str, size_bytes: int) -> None:
    """Leave of a file that did not take all what was written whole; without any, no file."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(Path(output).stat().st_mode):
            os.truncate(output, size_bytes) if size_bytes else Path(output).unlink()


def _opened(output: str, inputs: list[str]) -> IO[bytes]:
    try:
        for path in inputs:
            if path != "-" and Path(output).exists() and Path(path).exists() and Path(path).samefile(output):
                raise UsageError(f"--output {shown(output)}: is one of the inputs", hint="name another file")
        return Path(output).open("wb", buffering=0)  # what fails is not tried again at the end
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--output {shown(output)}: {reason}", hint="name a file in a folder that exists") from None
