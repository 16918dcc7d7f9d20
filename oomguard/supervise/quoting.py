"""Whether a command can only quote: what it prints of a failure is somebody else's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath

from oomguard.engines.inner_command import inner_commands
from oomguard.user_files import read_tables


def only_compares_texts(argv: Sequence[str]) -> bool:
    """Return whether a command, or all of a shell's text, compares or searches texts and does nothing else."""
    table = next(iter(read_tables("wrappers", [Path(__file__).with_name("wrappers.toml")]).values()))
    programs = {inner.program for inner in inner_commands(argv)}
    scripts = {PurePath(word).stem for word in argv if word.endswith(".py")}  # a Python file goes by its name too
    compare = programs & set(table["compare_texts"]) - scripts
    return bool(compare) and programs - compare <= set(table["beside_them"])
