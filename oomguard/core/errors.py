"""Define every exception that oomguard itself raises, and the partial result attached to one.

This module imports nothing of ours.

OomguardError
├── UsageError             a user's mistake: one message, exit status 2, no traceback
│   ├── InputError         a file that oomguard cannot read
│   ├── StoreError         a store of ``map`` that oomguard cannot use; finished rows are kept
│   ├── SettingError       an unknown setting, or a value that the setting cannot take
│   ├── ConfigError        a model's configuration that lacks a number or has an absurd one
│   └── RuleError          a broken rule file: names the file, key path and column
├── PlacementError         too few devices for a command or a mapping (exit status 125)
├── DeadlineError          the run's deadline passed before its first attempt (exit status 125)
├── JournalError           a database that is locked, damaged, unreachable or from a newer oomguard
├── WakeUpError            a sleeping engine whose memory is not free; it stays asleep
└── LaunchError            a command that could not start (exit status 126 or 127, as in a shell)

oomguard never replaces an exception of the user's code by one of these. If oomguard cannot fix a
failure, it raises the original exception with the diagnosis in its notes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class OomguardError(Exception):
    """Base class of every error that oomguard itself raises."""


class UsageError(OomguardError):
    """Report a mistake in how the user called oomguard.

    Args:
        message: what is wrong, with the input that is wrong.
        hint: what to do instead, also shown as a note in a traceback; None if nothing helps.

        >>> raise UsageError("--wait needs --gpus", hint="for example: --gpus auto --wait 30m")
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint is not None:
            self.add_note(hint)


class PlacementError(OomguardError):
    """Report that no device, or too few devices, are free. oomguard started nothing.

    Args:
        message: which devices are missing.
        hint: what to do; None if nothing helps.
        is_for_now: True if waiting helps, because another process uses a suitable device.
    """

    def __init__(self, message: str, *, hint: str | None = None, is_for_now: bool = False) -> None:
        super().__init__(message)
        self.hint = hint
        self.is_for_now = is_for_now
        if hint is not None:
            self.add_note(hint)


class JournalError(OomguardError):
    """Report a journal database that is locked, full, damaged, unreachable or too new.

    Args:
        message: what the database answered.
        hint: what to do; None if nothing helps.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint is not None:
            self.add_note(hint)


class NoJournalError(JournalError):
    """Report a database that contains another program's tables. oomguard never writes there."""


class DeadlineError(OomguardError):
    """Report that the run's deadline passed before the next attempt could start."""


class WakeUpError(OomguardError):
    """Report a sleeping engine that oomguard did not wake, because its memory is not free.

    Args:
        message: how much memory the engine needs and how much is free.
        hint: what to do.
    """

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint
        self.add_note(hint)


class InputError(UsageError):
    """Report an input file that is missing, unreadable, or not a regular file."""


class StoreError(UsageError):
    """Report a store of ``map`` that is damaged, full, or written by another program.

    Finished rows are kept.
    """


class SettingError(UsageError):
    """Report an unknown setting, or a value that the setting cannot take."""


class ConfigError(UsageError):
    """Report a model configuration that oomguard cannot plan with.

    Args:
        message: which field is wrong, and why.
        path: the file; None if the caller does not know it yet.
        hint: what to do; None if nothing helps.
    """

    def __init__(self, message: str, *, path: str | None = None, hint: str | None = None) -> None:
        super().__init__(f"{path}: {message}" if path else message, hint=hint)
        self.path = path


class RuleError(UsageError):
    """Report a rule or signature file that oomguard cannot use.

    Args:
        message: what is wrong.
        path: the file.
        key: the dotted key path in the file, such as ``fix[0].setting``; None if unknown.
        line: the line, from 1; None if unknown.
        column: the column, from 1; None if unknown. In an expression or a pattern it counts from
            the start of that text.
        hint: what to do; None if nothing helps.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str,
        key: str | None = None,
        line: int | None = None,
        column: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.path = path
        self.key = key
        self.line = line
        self.column = column

    def __str__(self) -> str:
        where = self.path
        if self.line is not None:
            where += f":{self.line}"
        if self.column is not None:
            where += f", column {self.column}"
        if self.key:
            where += f", {self.key}"
        return f"{where}: {self.args[0]}"


class LaunchError(OomguardError):
    """Report a command that could not start; ``exit_status`` is what a shell would return."""

    def __init__(self, message: str, *, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def exit_status_of(error: OomguardError) -> int:
    """Return the exit status of a command that ends with this error."""
    return int(getattr(error, "exit_status", 2 if isinstance(error, UsageError) else 125))


@dataclass(frozen=True, slots=True)
class Partial:
    """Hold the rows of a failed call that were finished.

    If ``result`` cannot be pickled, a pickled copy of this record has no rows.

    Attributes:
        rows: the number of rows of the whole call.
        done: the number of finished rows, which are the first ones.
        result: what the call would have returned for these rows alone. For vLLM's vectors it is a
            list with one entry for each request, None for a failed one. A tensor with fewer rows
            than the call is in host memory.
    """

    rows: int
    done: int
    result: Any = field(repr=False)

    def __len__(self) -> int:
        return self.done

    def __reduce__(self) -> tuple[Any, tuple[int, int, bytes]]:
        import pickle

        try:
            return _loaded_partial, (self.rows, self.done, pickle.dumps(self.result))
        except Exception:  # noqa: BLE001
            # The user's own type may not be picklable, but the exception that contains it must
            # still reach another process.
            return _loaded_partial, (self.rows, 0, pickle.dumps(None))


def _loaded_partial(rows: int, done: int, result: bytes) -> Partial:
    import pickle

    # ``__reduce__`` wrote these bytes into a pickle that is being read already.
    return Partial(rows, done, pickle.loads(result))  # noqa: S301
