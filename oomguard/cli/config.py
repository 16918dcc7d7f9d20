"""Read options from files: the user's own file, and the working directory's pyproject.toml.

The user's own file is ``oomguard/config.toml`` in the folder of XDG_CONFIG_HOME, and it may set any
option. ``[tool.oomguard]`` of the nearest pyproject.toml may come from a stranger, so it can only
restrict oomguard, and it never stops the command. Flags and OOMGUARD_* variables override both.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from oomguard.cli.options import seconds_in
from oomguard.core.errors import OomguardError, SettingError, UsageError
from oomguard.core.facts import FactValue
from oomguard.core.files import read_regular, user_folder
from oomguard.core.incident import Effect
from oomguard.core.settings import parse_assignment
from oomguard.core.text import strip_escapes
from oomguard.remedy.policy import DEFAULT_MAX_ATTEMPTS, DEFAULT_MAX_PER_HOUR, pinned_name

# Users start ``oomguard run`` in folders that they cloned or downloaded. Such a folder's
# ``[tool.oomguard]`` must not permit a change, name a file to write or a rule to trust, add
# attempts or time, hide a message, or stop the command.
# Sorted by how much may change. None is the default: reduced capacity only for settings that the
# user did not set.
_ALLOWED: Final = (
    str(Effect.OUTPUT_PRESERVING),
    None,
    str(Effect.REDUCES_CAPACITY),
    str(Effect.CHANGES_OUTPUTS),
)
# About 31 years. Python's locks reject times that are much longer.
_LONGEST_S: Final = 10**9
# Times that may be shortened, each with its default.
_RESTRICTIONS_TIMES: Final = {"deadline": math.inf, "wait": 0.0}
_COUNTS: Final = {"max_attempts": DEFAULT_MAX_ATTEMPTS, "max_per_hour": DEFAULT_MAX_PER_HOUR}
# A command runs at least once.
_LEAST: Final = {"max_attempts": 1}
# Harmless output formats. html is not one of them, because it ends a --follow.
_LOOKS: Final = {
    "format": ("terminal", "json", "md", "markdown"),
    "color": ("auto", "always", "never"),
    "log_format": ("console", "json"),
}
# A stranger's file must not fill the memory or the screen.
_MAX_ENTRIES: Final = 256
# Limit of a name or value that is compared with known ones, or shown.
_MAX_CHARS: Final = 100


class Restrictions:
    """Read a stranger's table: accepted options go to ``taken``, others to ``left_out``."""

    def __init__(self, own: Mapping[str, Any], options: Collection[str]) -> None:
        self.taken: dict[str, Any] = {}
        self.left_out: list[tuple[str, str]] = []
        self._own = own
        self._options = options

    def read(self, table: Any) -> None:
        """Accept the permitted options of the table."""
        if not isinstance(table, dict):
            self._leave("", f"[tool.oomguard] is a {type(table).__name__}, not a table")
            return
        if len(table) > _MAX_ENTRIES:
            self._leave("", f"[tool.oomguard] has more than {_MAX_ENTRIES} options")
            return
        for key, value in table.items():
            self._option(key.replace("-", "_"), value)

    def _option(self, name: str, value: Any) -> None:
        # An old limit must not be lost: version 0.1 counted the attempts after the first.
        if name == "max_relaunches" and type(value) is int:
            self._option("max_attempts", value + 1)
        elif name not in self._options:
            self._leave(name[:_MAX_CHARS], f"unknown option, {suggest_option(name, self._options)}")
        elif name == "allow":
            self._allow(value)
        elif name in _COUNTS or name in _RESTRICTIONS_TIMES:
            self._at_most(name, value)
        elif name == "restart":
            self._restart(value)
        elif name == "pin":
            self._pins(value)
        elif name == "min":
            self._floors(value)
        elif name in {"dry_run", "verbose"}:
            self._switch(name, value)
        elif name in _LOOKS:
            self._look(name, value)
        else:
            self._leave(name, f"only a flag, OOMGUARD_{name.upper()} or your own file can set it")

    def _allow(self, value: Any) -> None:
        own = self._own.get("allow")
        if value not in _ALLOWED or value is None:
            self._leave("allow", f"must be one of {', '.join(filter(None, _ALLOWED))}")
        elif own in _ALLOWED and _ALLOWED.index(value) > _ALLOWED.index(own):
            self._leave(
                "allow",
                f"{value} allows more than {own or 'the default'}; only {_who('allow')} can",
            )
        else:
            self.taken["allow"] = value

    def _at_most(self, name: str, given: Any) -> None:
        whole = name in _COUNTS
        most = self._own.get(name, {**_COUNTS, **_RESTRICTIONS_TIMES}[name])
        is_short = not isinstance(given, str) or len(given) <= _MAX_CHARS
        if is_short and not whole:
            value = seconds_in(given)
        else:
            value = given
        if not isinstance(value, int if whole else (int, float)) or isinstance(value, bool):
            self._leave(
                name,
                "must be a whole number" if whole else "must be a time such as 30m or 90 (seconds)",
            )
        elif not _LEAST.get(name, 0) <= value <= _LONGEST_S:
            if whole and value > 0:
                of = f"more than {most}; only {_who(name)} can raise it"
            else:
                of = f"must be between {_LEAST.get(name, 0)} and {_LONGEST_S}"
            self._leave(name, of)
        elif value > most:
            self._leave(name, f"more than {most}; only {_who(name)} can raise it")
        else:
            self.taken[name] = value

    def _restart(self, value: Any) -> None:
        if value == "no":
            self.taken["restart"] = value
        else:
            self._leave("restart", f"must be no; only {_who('restart')} can allow restarts")

    def _pins(self, value: Any) -> None:
        pins = list(self._own.get("pin", ()))
        for entry in self._entries("pin", value):
            try:
                pins.append(pinned_name(entry if isinstance(entry, str) else ""))
            except SettingError:
                self._leave("pin", f"unknown setting {_restrictions_shown(entry)}")
        if pins:
            self.taken["pin"] = list(dict.fromkeys(pins))

    def _floors(self, value: Any) -> None:
        """Take the higher of two floors, because the table cannot lower the user's own."""
        floors: dict[str, tuple[FactValue, str]] = {}
        if isinstance(value, dict):
            given = [f"{key}={entry}" for key, entry in value.items()]
        else:
            given = value
        own = list(self._own.get("min", ()))
        for entry in [*own, *self._entries("min", given)]:
            if entry not in own and (not isinstance(entry, str) or len(entry) > _MAX_CHARS):
                self._leave("min", f"not SETTING=VALUE: {_restrictions_shown(entry)}")
                continue
            try:
                name, floor = parse_assignment(entry)
            except (OomguardError, ValueError, OverflowError) as error:
                self._leave("min", str(error))
                continue
            before = floors.get(name)
            if before is None or _is_higher(floor, before[0]):
                floors[name] = (floor, entry)
        if floors:
            self.taken["min"] = [entry for _, entry in floors.values()]

    def _switch(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            self._leave(name, "must be true or false")
        elif value:
            self.taken[name] = True
        elif self._own.get(name):
            self._leave(name, f"only {_who(name)} can turn it off")

    def _look(self, name: str, value: Any) -> None:
        if isinstance(value, str) and value in _LOOKS[name]:
            self.taken[name] = value
        else:
            self._leave(name, f"must be one of {', '.join(_LOOKS[name])}")

    def _entries(self, name: str, value: Any) -> list[Any]:
        if isinstance(value, list):
            entries = value
        else:
            entries = [value]
        if len(entries) > _MAX_ENTRIES:
            self._leave(name, f"more than {_MAX_ENTRIES} entries")
            return []
        return entries

    def _leave(self, name: str, why: str) -> None:
        self.left_out.append((name, why))


_RENAMED: Final = {
    "max_relaunches": "write max_attempts, which also counts the first attempt",
}


def suggest_option(name: str, options: Collection[str]) -> str:
    """Suggest the option nearest to an unknown name, or list all options."""
    import difflib

    if name in _RENAMED:
        return _RENAMED[name]
    near = difflib.get_close_matches(name[:_MAX_CHARS], options, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"options: {', '.join(options)}"


def _who(name: str) -> str:
    return f"a flag, OOMGUARD_{name.upper()} or your own file"


def _is_higher(one: FactValue, other: FactValue) -> bool:
    return not isinstance(one, str) and not isinstance(other, str) and one > other


def _restrictions_shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value)[:_MAX_CHARS]
    return type(value).__name__


OPTIONS: Final = (
    "allow",
    "pin",
    "min",
    "max_attempts",
    "max_per_hour",
    "deadline",
    "dry_run",
    "idempotent",
    "report",
    "metrics",
    "step_recovery",
    "snapshot",
    "journal",
    "reuse",
    "rules",
    "set",
    "gpu_memory",
    "format",
    "jobs",
    "follow",
    "output",
    "no_mask",
    "quiet",
    "verbose",
    "grace",
    "input",
    "pty",
    "exit_code",
    "color",
    "log_format",
    "gpus",
    "wait",
    "lease",
    "lease_folder",
    "restart",
    "hang_after",
    "host_reserve",
    "termination_message",
    "probes",
    "exit_status",
    "slurm_comment",
    "slurm_requeue",
    "rank",
    "world_size",
    "rendezvous",
    "rank_timeout",
)
# These options take a list, and a single value counts as a list of one.
_REPEATABLE: Final = frozenset({"pin", "min", "rules", "set"})


def _check_folder(path: str) -> None:
    """Check a folder of rules.

    Raises:
        SettingError: if there is no such folder.
    """
    if not Path(path).is_dir():
        raise SettingError(f"{path!r} is not a folder", hint="a folder of .toml files")


_CHECKS: Final[Mapping[str, Callable[[str], object]]] = {
    "pin": pinned_name,
    "min": parse_assignment,
    "rules": _check_folder,
}
_SWITCHES: Final = frozenset(
    {
        "dry_run",
        "idempotent",
        "pty",
        "quiet",
        "verbose",
        "exit_code",
        "follow",
        "no_mask",
        "reuse",
        "slurm_comment",
        "step_recovery",
    }
)
# Options with text that may be only a number.
_PORTS_AND_COUNTS: Final = frozenset({"gpus", "metrics", "probes"})
_NUMBERS: Final = frozenset({"max_attempts", "max_per_hour", "slurm_requeue", "rank", "world_size"})
_TIMES: Final = frozenset({"deadline", "grace", "wait", "hang_after", "rank_timeout"})
# Option -> parameter of the sub-commands, if Python already uses the option's name.
_PARAMETERS: Final = {
    "format": "form",
    "input": "input_file",
    "min": "floors",
    "pin": "pinned",
    "set": "given",
}
_TABLE: Final = "[tool.oomguard]"
# The spellings of the table in TOML: one header, or ``tool`` alone with ``oomguard`` below it.
_MAY_HOLD_TABLE: Final = (
    rb"(?m)tool[\"'\t ]*\.[\"'\t ]*oomguard|^[\t ]*\[?[\t ]*[\"']?tool[\"']?[\t ]*[\]=]"
)
# Limits for a stranger's file. tomllib needs time and memory that grow with the square of the
# number of dots in a key.
_MAX_BYTES: Final = 256 * 1024
# Each dot of a key nests one more table, and the stack is limited.
_MAX_DOTS_A_LINE: Final = 200
# More lines would hide the command's own output.
_MAX_REPORTED: Final = 10


class OptionsFile(NamedTuple):
    """Hold the options of one file; ``left_out`` holds rejected options with the reasons."""

    place: str
    taken: Mapping[str, Any] = MappingProxyType({})
    left_out: tuple[tuple[str, str], ...] = ()


class Configuration(NamedTuple):
    """Hold the options of all files, by parameter name, and each file that was read."""

    options: Mapping[str, Any] = MappingProxyType({})
    files: tuple[OptionsFile, ...] = ()

    def report(self, warn: Callable[[str], None], detail: Callable[[str], None]) -> None:
        """Report rejected options to ``warn``, and each file's accepted options to ``detail``."""
        for file in self.files:
            taken = " ".join(f"{option}={_shown(value)}" for option, value in file.taken.items())
            detail(_line(f"options of {file.place}: {taken or 'none'}"))
            for option, why in file.left_out[:_MAX_REPORTED]:
                warn(_line(f"{file.place}: ignored {f'{option}: ' if option else ''}{why}"))
            if len(file.left_out) > _MAX_REPORTED:
                warn(_line(f"{file.place}: ignored {len(file.left_out) - _MAX_REPORTED} more"))


def read_configuration(start: Path | None = None) -> Configuration:
    """Read both files.

    Args:
        start: where the search for pyproject.toml begins, upwards; None for the working directory.

    Raises:
        UsageError: if the user's own file has an unknown option or a wrong value.
    """
    own = _own_options()
    project = _project_options(start, own.taken if own else {})
    if own:
        options = dict(own.taken)
    else:
        options = {}
    options |= project.taken if project else {}
    files = tuple(filter(None, (own, project)))
    return Configuration(
        {_PARAMETERS.get(name, name): value for name, value in options.items()}, files
    )


def source_of(option: str, words: Sequence[str]) -> str | None:
    """Return which variable or file sets an option, such as ``"OOMGUARD_PIN"``.

    None if a flag or nothing sets it.

    Args:
        option: its name, with hyphens or underscores.
        words: the words of the command line.
    """
    name = option.replace("-", "_")
    flag_name = name.replace("_", "-")
    variable = f"OOMGUARD_{name.upper()}"
    for word in words:
        if word == "--":
            break
        if word.startswith("--") and word[2:].partition("=")[0] == flag_name:
            return None
    if os.environ.get(variable):
        return variable
    for file in reversed(read_configuration().files):
        if name in file.taken:
            return f"{file.place}: {name}"
    return None


def own_file() -> Path:
    """Return the path of the user's own options.

    A relative XDG_CONFIG_HOME is ignored, because it would mean the working directory.
    """
    named = os.environ.get("XDG_CONFIG_HOME", "")
    if named and not Path(named).is_absolute():
        folder = Path.home() / ".config" / "oomguard"
    else:
        folder = None
    return (folder or user_folder("config")) / "config.toml"


def _own_options() -> OptionsFile | None:
    path = own_file()
    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8")
        # Most users have no such file.
        import tomllib

        table = tomllib.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        # Most users have no such file.
        return None
    except OSError as error:
        if not os.access(
            path.parent, os.X_OK
        ):  # another user's folder: many containers change the user but keep HOME
            return None
        raise UsageError(
            f"{path}: {error.strerror}", hint="oomguard reads your own options from this file"
        ) from None
    except (ValueError, RecursionError) as error:
        why = "the file is nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(
            f"{path}: {why}", hint="oomguard reads your own options from this file"
        ) from None
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            raise UsageError(f"{path}: unknown option {key!r}", hint=suggest_option(name, OPTIONS))
        values[name] = _value(name, value, path)
    return OptionsFile(str(path), values)


def _project_options(start: Path | None, own: Mapping[str, Any]) -> OptionsFile | None:
    """Return the options of the nearest table; None if there is none. Never raises."""
    place = "pyproject.toml"
    try:
        folder = start or Path.cwd()
    except OSError:  # the working directory no longer exists
        return None
    try:
        for parent in (folder, *folder.parents):
            path = parent / "pyproject.toml"
            place = str(path)
            table = _table(path)
            if table is not None:
                restrictions = Restrictions(own, OPTIONS)
                restrictions.read(table)
                return OptionsFile(
                    f"{place}, {_TABLE}", restrictions.taken, tuple(restrictions.left_out)
                )
    except Exception as error:  # noqa: BLE001
        # A stranger wrote the file, so no content of it may stop the user's command.
        why = str(error)[:200] or type(error).__name__
        return OptionsFile(f"{place}, {_TABLE}", {}, (("", f"oomguard cannot read it: {why}"),))
    return None


def _table(path: Path) -> Any:
    """Return the table of a stranger's file; None if it has none.

    Raises:
        ValueError: if the file is not safe to read.
    """
    try:
        if not path.exists():
            return None
        # Opening a pipe would wait for a writer.
        if not path.is_file():
            raise ValueError("it is not a regular file")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError:
        return None
    if b"oomguard" not in content:
        return None
    if len(content) > _MAX_BYTES:
        raise ValueError(f"the file is larger than {_MAX_BYTES // 1024} KiB")
    # A file that only lists oomguard as a dependency is not worth loading a TOML parser.
    if not re.search(_MAY_HOLD_TABLE, content):
        return None
    if any(line.count(b".") > _MAX_DOTS_A_LINE for line in content.splitlines()):
        raise ValueError(f"a line has more than {_MAX_DOTS_A_LINE} dots")
    import tomllib

    tool = tomllib.loads(content.decode("utf-8")).get("tool")
    if isinstance(tool, dict):
        return tool.get("oomguard")
    return None


def _value(name: str, value: Any, path: Path) -> Any:
    """Return a value as the command line would: a list for a repeatable option."""
    if name in _REPEATABLE:
        if isinstance(value, dict):
            entries = [f"{key}={entry}" for key, entry in value.items()]
        elif isinstance(value, list):
            entries = list(map(str, value))
        else:
            entries = [str(value)]
        check = _CHECKS.get(name, str)
        try:
            for entry in entries:
                check(entry)
        except SettingError as error:
            raise UsageError(f"{path}: {name}: {error}", hint=error.hint) from None
        return entries
    if name in _TIMES:
        seconds = seconds_in(value)
        if seconds is None:
            raise UsageError(
                f"{path}: {name} must be a time such as 30m, 1h30m or 90 (seconds), not {value!r}"
            )
        return seconds
    if name in _PORTS_AND_COUNTS and type(value) is int:
        return str(value)
    if name in _SWITCHES:
        wanted: type = bool
        kind = "true or false"
    elif name in _NUMBERS:
        wanted = int
        kind = "a whole number"
    else:
        wanted = str
        kind = "text"
    if type(value) is not wanted:
        raise UsageError(f"{path}: {name} must be {kind}, not {value!r}")
    return value


def _shown(value: object) -> str:
    """Return a value without the password in a URL."""
    if "://" not in str(value):
        return str(value)
    from oomguard.core.redact import mask

    return mask(str(value))


def _line(text: str) -> str:
    return strip_escapes(text).encode("utf-8", "replace").decode()
