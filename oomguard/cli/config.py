"""Options from ``[tool.oomguard]`` of the nearest pyproject.toml; flags and OOMGUARD_* variables win over them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

from oomguard.errors import UsageError

OPTIONS: Final = (
    "allow", "pin", "min", "max_relaunches", "deadline", "dry_run", "report", "journal", "rules", "set", "gpu_memory",
    "format", "quiet", "verbose", "grace", "exit_code", "color", "log_format",
)  # fmt: skip
# Option -> parameter of the sub-commands, where the option's own name is taken in Python.
_PARAMETERS: Final = {"format": "form", "min": "minimum", "set": "given"}


def defaults_from_pyproject(start: Path | None = None) -> dict[str, Any]:
    """The table's options by parameter name, empty where there is no table; raises UsageError for an unknown option."""
    folder = start or Path.cwd()
    for path in (parent / "pyproject.toml" for parent in (folder, *folder.parents)):
        if not path.is_file():
            continue
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("oomguard")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise UsageError(f"{path}: {error}", hint="oomguard reads [tool.oomguard] there") from None
        if table is not None:
            return _checked(table, path)
    return {}


def _checked(table: dict[str, Any], path: Path) -> dict[str, Any]:
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            import difflib

            near = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"options: {', '.join(OPTIONS)}"
            raise UsageError(f"{path}, [tool.oomguard]: unknown option {key!r}", hint=hint)
        name = _PARAMETERS.get(name, name)
        values[name] = [str(v) for v in value] if isinstance(value, list) else value
    return values
