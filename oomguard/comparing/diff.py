"""The public door: what changed between a start that worked and one that did not."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from oomguard.comparing.compare import compare
from oomguard.comparing.comparison import ComparedStart, Comparison
from oomguard.comparing.starts import compared_start
from oomguard.diagnosing import diagnose, diagnose_stream
from oomguard.errors import InputError, UsageError
from oomguard.incident import Diagnosis
from oomguard.observe.source import open_log, open_standard_input, shown
from oomguard.remedy.policy import Policy
from oomguard.rules.load import RuleSet

_STANDARD_INPUT = "-"


def diff(
    old: str | Path | Diagnosis,
    new: str | Path | Diagnosis,
    *,
    old_start: int | None = None,
    new_start: int | None = None,
    policy: Policy | None = None,
) -> Comparison:
    """Say what changed from one start of an engine to another: versions, settings, each part of the memory.

    Args:
        old: the log of the start that worked: its path, its text, or its Diagnosis. A string is a path if a file of
            that name exists, else the text itself.
        new: the log of the start that did not.
        old_start: which start of ``old``, counted from 1; None takes the last one with figures.
        new_start: which start of ``new``.
        policy: what a plan for the failed start may change.

    Raises:
        InputError: a log cannot be read, or holds no start of that number.
        UsageError: a source is neither a path, nor a text, nor a Diagnosis.
    """
    return compare(_start_of(old, old_start, policy), _start_of(new, new_start, policy))


def diff_logs(
    old: str,
    new: str,
    *,
    old_start: int | None = None,
    new_start: int | None = None,
    policy: Policy | None = None,
    rules: RuleSet | None = None,
) -> Comparison:
    """Compare the logs at two paths, one of which may be ``-`` for standard input; otherwise as ``diff``."""
    if old == new == _STANDARD_INPUT:
        raise UsageError("OLD and NEW are both standard input", hint="name one of the two logs")
    first = compared_start(_diagnosis_of(old, policy, rules), old_start)
    return compare(first, compared_start(_diagnosis_of(new, policy, rules), new_start))


def _diagnosis_of(path: str, policy: Policy | None, rules: RuleSet | None) -> Diagnosis:
    try:
        with contextlib.closing(open_standard_input() if path == _STANDARD_INPUT else open_log(path)) as stream:
            return diagnose_stream(stream, path, rules=rules, policy=policy)
    except OSError as error:
        raise InputError(f"{shown(path)}: {error.strerror or error}") from None


def _start_of(source: object, number: int | None, policy: Policy | None) -> ComparedStart:
    if isinstance(source, Diagnosis):
        return compared_start(source, number)
    if isinstance(source, os.PathLike):
        source = Path(source)
    if not isinstance(source, str | Path):
        hint = "the path of a log, its text, or what oomguard.diagnose returns"
        raise UsageError(f"diff expects a log, not {type(source).__name__}", hint=hint)
    diagnosis = diagnose(source, policy=policy)
    one_line = isinstance(source, str) and not diagnosis.source and "\n" not in source
    if one_line and not diagnosis.starts and not diagnosis.incidents:
        hint = "give the path of a log, its text, or what oomguard.diagnose returns"
        raise InputError(f"{shown(str(source))}: no such file, and not the text of a log", hint=hint)
    return compared_start(diagnosis, number)
