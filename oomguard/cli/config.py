"""Options from ``[tool.oomguard]`` of the nearest pyproject.toml; flags and OOMGUARD_* variables win over them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

from oomguard.errors import UsageError

OPTIONS: Final = (
    "allow",
    "pin",
    "min",
    "max_relaunches",
    "deadline",
    "dry_run",
    "report",
    "journal",
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
    "exit_code",
    "color",
    "log_format",
)
_REPEATABLE: Final = frozenset({"pin", "min", "rules", "set"})
_SWITCHES: Final = frozenset({"dry_run", "quiet", "verbose", "exit_code", "follow", "no_mask"})
_NUMBERS: Final = frozenset({"max_relaunches", "deadline", "grace"})
# Option -> parameter of the sub-commands, where the option's own name is taken in Python.
_PARAMETERS: Final = {"format": "form", "min": "floors", "pin": "pinned", "set": "given"}


def defaults_from_pyproject(start: Path | None = None) -> dict[str, Any]:
    """Return the table's options by parameter name, empty without a table; raises UsageError for an unknown option."""
    try:
        folder = start or Path.cwd()
    except OSError:  # it was removed
        return {}
    for path in (parent / "pyproject.toml" for parent in (folder, *folder.parents)):
        if not path.is_file():
            continue
        try:
            tool = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
            table = tool.get("oomguard") if isinstance(tool, dict) else None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise UsageError(f"{path}: {error}", hint="oomguard reads [tool.oomguard] there") from None
        if table is not None:
            return _checked(table, path)
    return {}


def _checked(table: Any, path: Path) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise UsageError(f"{path}: [tool.oomguard] is a {type(table).__name__}, not a table")
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            import difflib

            near = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"options: {', '.join(OPTIONS)}"
            raise UsageError(f"{path}, [tool.oomguard]: unknown option {key!r}", hint=hint)
        values[_PARAMETERS.get(name, name)] = _value(name, value, path)
    return values


def _value(name: str, value: Any, path: Path) -> Any:
    """Return a value as the command line would have it: several for a repeatable option, one for any other."""
    if name in _REPEATABLE:
        if isinstance(value, dict):
            return [f"{key}={entry}" for key, entry in value.items()]
        return [str(entry) for entry in value] if isinstance(value, list) else [str(value)]
    wanted: type | tuple[type, ...] = bool if name in _SWITCHES else (int, float) if name in _NUMBERS else str
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        kind = "true or false" if name in _SWITCHES else "a number" if name in _NUMBERS else "text"
        raise UsageError(f"{path}, [tool.oomguard]: {name} is {kind}, not {value!r}")
    return value
