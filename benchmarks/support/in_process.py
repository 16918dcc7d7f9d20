"""The command line in this process: most of what a test of it takes is otherwise the start of a
Python.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO, Any
from unittest import mock

from oomguard.cli import main

STREAMS = ("stdin", "stdout", "stderr")


@contextlib.contextmanager
def _standard(number: int, file: IO[bytes]) -> Iterator[None]:
    """Let a standard descriptor and its stream in ``sys`` be those of the file."""
    kept = os.dup(number)
    name = STREAMS[number]
    before = getattr(sys, name)
    os.dup2(file.fileno(), number)
    stream = open(  # noqa: SIM115 - it is the standard stream from here on
        number, "w" if number else "r", encoding="utf-8", errors="surrogateescape", closefd=False
    )
    setattr(sys, name, stream)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            stream.close()
        setattr(sys, name, before)
        os.dup2(kept, number)
        os.close(kept)


def oomguard_bytes(
    *words: object,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> CompletedProcess[bytes]:
    """Run a command of oomguard that starts no program of the user's; ``env`` is added to the
    environment.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in STREAMS]
        files[0].write(stdin)
        files[0].seek(0)
        status: Any = 0
        with contextlib.ExitStack() as changed:
            changed.enter_context(mock.patch.dict(os.environ, env or {}))
            changed.enter_context(contextlib.chdir(cwd or Path.cwd()))
            for number, file in enumerate(files):
                changed.enter_context(_standard(number, file))
            try:
                main([os.fspath(word) if isinstance(word, Path) else str(word) for word in words])
            except SystemExit as ended:
                status = ended.code
        for file in files[1:]:
            file.seek(0)
        return CompletedProcess(words, int(status or 0), files[1].read(), files[2].read())


def oomguard_text(
    *words: object, stdin: str = "", env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> CompletedProcess[str]:
    """Do the same with text."""
    ran = oomguard_bytes(*words, stdin=stdin.encode(), env=env, cwd=cwd)
    return CompletedProcess(ran.args, ran.returncode, ran.stdout.decode(), ran.stderr.decode())
