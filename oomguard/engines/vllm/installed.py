"""Where the vLLM lies that a command runs: the package of the Python that the command names, or that its ``vllm`` program names.

Only what stands on this machine is found: behind ``docker run``, ``ssh`` or ``uv run`` another Python may run than the one on PATH.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Final

from oomguard.engines.command import Launch
from oomguard.engines.inner_command import environment_tools, inner_commands
from oomguard.regular_file import open_regular

_MOST_BYTES: Final = 4096
_PYTHON: Final = re.compile(r"python[\d.]*")
_PROGRAM: Final = "vllm"
# How a script names its interpreter; the second form is pip's, for a path that is too long for the first.
_NAMED: Final = re.compile(rb"#!(/[^\s]*/python[\d.]*)\s|#!/bin/sh\n'''exec' \"?(/[^\"\n]*/python[\d.]*)\"? ")
_PACKAGES: Final = ("lib*/python3*/site-packages/vllm", "lib*/python3*/dist-packages/vllm")


def installed_package(launch: Launch, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the vLLM package that a launch runs; None where it is not found.

    Args:
        launch: the command.
        environ: the inherited environment.
    """
    word = _interpreter_word(launch.argv)
    found = word and shutil.which(word, path=launch.env.get("PATH", environ.get("PATH", os.defpath)))
    python = _python_of(Path(found)) if found else None
    if python is None:
        return None
    # The environment is where the interpreter is named, not where a link of it leads: that would be the base of a venv.
    packages = {package.resolve() for part in _PACKAGES for package in python.parent.parent.glob(part)}
    return packages.pop() if len(packages) == 1 else None


def _interpreter_word(argv: Sequence[str]) -> str | None:
    """Return the word that names the Python, or the program of vLLM, that the command line runs in the end."""
    commands = inner_commands(argv)
    if len(commands) != 1:
        return None
    at = len(argv) - len(commands[0].args)
    if tuple(argv[at:]) != commands[0].args:  # in a shell's text
        return None
    names = [PurePath(word).name for word in argv[:at]]
    if environment_tools() & set(names):
        return None
    last = max((i for i, name in enumerate(names) if name == _PROGRAM or _PYTHON.fullmatch(name)), default=None)
    return None if last is None else argv[last]


def _python_of(program: Path) -> Path | None:
    """Return the interpreter that runs a program: itself, or the one that a script names at its beginning."""
    if _PYTHON.fullmatch(program.name):
        return program
    try:
        with open_regular(program) as stream:
            found = _NAMED.match(stream.read(_MOST_BYTES))
    except OSError:
        return None
    return Path(os.fsdecode(found[1] or found[2])) if found else None
