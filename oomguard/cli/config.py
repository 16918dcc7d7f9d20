"""Options from files: the user's own, which may say anything, and the working directory's, which only restricts.

The user's own file is ``oomguard/config.toml`` in the folder of XDG_CONFIG_HOME. ``[tool.oomguard]`` of the nearest pyproject.toml is
a stranger's word (restrictions.py), and whatever it holds, the command goes on. Flags and OOMGUARD_* variables win over both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from oomguard.cli.durations import seconds_in
from oomguard.cli.restrictions import Restrictions, said_of_unknown
from oomguard.errors import UsageError
from oomguard.escapes import strip_escapes
from oomguard.regular_file import read_regular
from oomguard.user_files import user_folder

OPTIONS: Final = (
    "allow",
    "pin",
    "min",
    "max_relaunches",
    "max_per_hour",
    "deadline",
    "dry_run",
    "idempotent",
    "report",
    "metrics",
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
_REPEATABLE: Final = frozenset({"pin", "min", "rules", "set"})
_SWITCHES: Final = frozenset(
    {"dry_run", "idempotent", "pty", "quiet", "verbose", "exit_code", "follow", "no_mask", "reuse", "slurm_comment"}
)
# Text that may be a number alone.
_PORTS_AND_COUNTS: Final = frozenset({"gpus", "metrics", "probes"})
_NUMBERS: Final = frozenset({"max_relaunches", "max_per_hour", "slurm_requeue", "rank", "world_size"})
_TIMES: Final = frozenset({"deadline", "grace", "wait", "hang_after", "rank_timeout"})
# Option -> parameter of the sub-commands, where the option's own name is taken in Python.
_PARAMETERS: Final = {"format": "form", "input": "input_file", "min": "floors", "pin": "pinned", "set": "given"}
_TABLE: Final = "[tool.oomguard]"
# A stranger's file is read no further than this. tomllib takes a time and a memory that grow with the square of a key's dots.
_MAX_BYTES: Final = 256 * 1024
_MAX_DOTS_A_LINE: Final = 200
_MAX_TOLD: Final = 10


@dataclass(frozen=True, slots=True)
class OptionsFile:
    """One file that was read: ``taken`` is what it says by option, ``left_out`` holds an option and why, for each that is not."""

    place: str
    taken: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Configuration:
    """What all files together say, by the sub-commands' parameters, and each file that was read."""

    options: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[OptionsFile, ...] = ()

    def tell(self, warn: Callable[[str], None], detail: Callable[[str], None]) -> None:
        """Say what was left out and why (``warn``), and which file was read for what (``detail``)."""
        for file in self.files:
            taken = " ".join(f"{option}={_shown(value)}" for option, value in file.taken.items())
            detail(_line(f"options of {file.place}: {taken or 'none'}"))
            for option, why in file.left_out[:_MAX_TOLD]:
                warn(_line(f"{file.place}: left out, {f'{option}: ' if option else ''}{why}"))
            if len(file.left_out) > _MAX_TOLD:
                warn(_line(f"{file.place}: left out, {len(file.left_out) - _MAX_TOLD} more"))


def read_configuration(start: Path | None = None) -> Configuration:
    """Read both files.

    Args:
        start: where the search for pyproject.toml begins, upwards; the working directory if None.

    Raises:
        UsageError: the user's own file holds an unknown option or a wrong value.
    """
    own = _own_options()
    project = _project_options(start, own.taken if own else {})
    options = dict(own.taken) if own else {}
    options |= project.taken if project else {}
    files = tuple(file for file in (own, project) if file)
    return Configuration({_PARAMETERS.get(name, name): value for name, value in options.items()}, files)


def own_file() -> Path:
    """Where the user's own options lie; a relative XDG_CONFIG_HOME would be the working directory's and does not count."""
    named = os.environ.get("XDG_CONFIG_HOME", "")
    folder = Path.home() / ".config" / "oomguard" if named and not Path(named).is_absolute() else None
    return (folder or user_folder("config")) / "config.toml"


def _own_options() -> OptionsFile | None:
    path = own_file()
    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8")
        import tomllib  # most users have no such file

        table = tomllib.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if not os.access(path.parent, os.X_OK):  # another user's folder: a changed user keeps HOME in many containers
            return None
        raise UsageError(f"{path}: {error.strerror}", hint="oomguard reads your own options there") from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise UsageError(f"{path}: {why}", hint="oomguard reads your own options there") from None
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            raise UsageError(f"{path}: unknown option {key!r}", hint=said_of_unknown(name, OPTIONS))
        values[name] = _value(name, value, path)
    return OptionsFile(str(path), values)


def _project_options(start: Path | None, own: Mapping[str, Any]) -> OptionsFile | None:
    """Return what the nearest table says, None without one; whatever stands there, nothing is raised."""
    place = "pyproject.toml"
    try:
        folder = start or Path.cwd()
    except OSError:  # it was removed
        return None
    try:
        for path in (parent / "pyproject.toml" for parent in (folder, *folder.parents)):
            place = str(path)
            table = _table(path)
            if table is not None:
                restrictions = Restrictions(own, OPTIONS)
                restrictions.read(table)
                return OptionsFile(f"{place}, {_TABLE}", restrictions.taken, tuple(restrictions.left_out))
    except Exception as error:  # noqa: BLE001 - a stranger wrote it: no content of it ends the user's command
        why = str(error)[:200] or type(error).__name__
        return OptionsFile(f"{place}, {_TABLE}", {}, (("", f"it cannot be read: {why}"),))
    return None


def _table(path: Path) -> Any:
    """Return the table of a stranger's file, None where it has none; raises ValueError for one that is not safe to read."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError:
        return None
    if b"oomguard" not in content:
        return None
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES // 1024} KiB")
    if any(line.count(b".") > _MAX_DOTS_A_LINE for line in content.splitlines()):
        raise ValueError(f"a line has more than {_MAX_DOTS_A_LINE} dots")
    import tomllib

    tool = tomllib.loads(content.decode("utf-8")).get("tool")
    return tool.get("oomguard") if isinstance(tool, dict) else None


def _value(name: str, value: Any, path: Path) -> Any:
    """Return a value as the command line would have it: several for a repeatable option, one for any other."""
    if name in _REPEATABLE:
        if isinstance(value, dict):
            return [f"{key}={entry}" for key, entry in value.items()]
        return [str(entry) for entry in value] if isinstance(value, list) else [str(value)]
    if name in _TIMES:
        seconds = seconds_in(value)
        if seconds is None:
            raise UsageError(f"{path}: {name} is a time such as 30m, 1h30m, or 90 (seconds), not {value!r}")
        return seconds
    if name in _PORTS_AND_COUNTS and type(value) is int:
        return str(value)
    wanted: type | tuple[type, ...] = bool if name in _SWITCHES else (int, float) if name in _NUMBERS else str
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        kind = "true or false" if name in _SWITCHES else "a number" if name in _NUMBERS else "text"
        raise UsageError(f"{path}: {name} is {kind}, not {value!r}")
    return value


def _shown(value: object) -> str:
    """Return a value without the password of a URL."""
    if "://" not in str(value):
        return str(value)
    from oomguard.report.mask import mask

    return mask(str(value))


def _line(text: str) -> str:
    return strip_escapes(text).encode("utf-8", "replace").decode()
