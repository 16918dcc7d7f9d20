"""Every exception oomguard raises on its own behalf; this file imports nothing from the package.

OomguardError
├── UsageError             a user's mistake: shown as one message, exit status 2, never a traceback
│   ├── InputError         a file that cannot be read
│   ├── StoreError         a store of ``map`` that cannot be used, or cannot go on: what was
finished is kept │   ├── SettingError       an unknown setting, or a value it cannot take │   ├──
ConfigError        a model's configuration that lacks a number or has an absurd one: says file and
field │   └── RuleError          a rule file that cannot be used: says file, key path and column ├──
PlacementError         no device for a command, or not enough for a mapping of names to devices
(exit status 125) ├── DeadlineError          the time of a run was over before its first attempt
(exit status 125) ├── JournalError           a journal's database that is locked, damaged, away or
of a newer oomguard: what is written waits ├── WakeUpError            a sleeping engine whose memory
is not free: it is not woken, and sleeps on └── LaunchError            a command that could not be
started (exit status 126 or 127, as a shell)

What the user's own code raises is never replaced by one of these: when nothing can be remedied the
original exception is raised again with the diagnosis added to its notes.
"""

from __future__ import annotations


class OomguardError(Exception):
    """Base of every error that oomguard raises on its own behalf."""


class UsageError(OomguardError):
    """A mistake in how oomguard was called; ``hint`` says what to do instead, and stands in a
    traceback as a note.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint is not None:
            self.add_note(hint)


class PlacementError(OomguardError):
    """No device for a command, or not enough devices for what is to be placed; nothing was started.
    ``hint`` says what to do.

    ``is_for_now`` says whether waiting would help: a device that would do is there, and somebody
    has it.
    """

    def __init__(self, message: str, *, hint: str | None = None, is_for_now: bool = False) -> None:
        super().__init__(message)
        self.hint = hint
        self.is_for_now = is_for_now
        if hint is not None:
            self.add_note(hint)


class JournalError(OomguardError):
    """A journal's database that cannot be used now: locked, full, damaged, away, or a newer
    oomguard's. ``hint`` says what to do.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint is not None:
            self.add_note(hint)


class NoJournalError(JournalError):
    """A database that holds another program's tables where a journal has its own: nothing is ever
    written there.
    """


class DeadlineError(OomguardError):
    """The deadline of a run came before the attempt that was to begin: nothing is
    started after it.
    """


class WakeUpError(OomguardError):
    """A sleeping engine that is not woken: its device has less free than it needs; ``hint`` says
    what to do.
    """

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint
        self.add_note(hint)


class InputError(UsageError):
    """An input file that is missing, is not readable, or is not a file."""


class StoreError(UsageError):
    """A store of ``map`` that is damaged, full, another version's or another program's; what was
    finished is kept.
    """


class SettingError(UsageError):
    """An unknown setting or a value that the setting cannot take."""


class ConfigError(UsageError):
    """A model's configuration that cannot be planned with; ``path`` is the file, None where it is
    not known yet.
    """

    def __init__(self, message: str, *, path: str | None = None, hint: str | None = None) -> None:
        super().__init__(f"{path}: {message}" if path else message, hint=hint)
        self.path = path


class RuleError(UsageError):
    """A rule or signature file that cannot be used.

    ``path`` is the file, ``key`` the dotted key path inside it (``fix[0].setting``), ``line`` and
    ``column`` are 1-based and None where unknown; for an expression or a pattern the column counts
    inside its own text.
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
    """A command that could not be started; ``exit_status`` is what a shell would return."""

    def __init__(self, message: str, *, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def exit_status_of(error: OomguardError) -> int:
    """Return the exit status of a command line that ends of this error."""
    return int(getattr(error, "exit_status", 2 if isinstance(error, UsageError) else 125))
