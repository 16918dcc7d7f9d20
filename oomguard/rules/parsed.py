"""The shipped rule files as tables, read once: parsing ninety TOML files takes longer than diagnosing a short log."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oomguard.kept import keep, kept_file
from oomguard.rules.table import read_toml


def read_tables(root: Path) -> dict[Path, dict[str, Any]]:
    """Every file under ``root`` and its table, sorted by path; kept in the user's cache until a file changes.

    Raises RuleError for a file that cannot be read.
    """
    paths = sorted(root.rglob("*.toml"))
    kept = kept_file("rules-{}.json", _states(paths))
    with contextlib.suppress(OSError, ValueError):
        tables = json.loads(kept.read_text(encoding="utf-8"))
        if isinstance(tables, list) and len(tables) == len(paths):
            return dict(zip(paths, tables, strict=True))
    found = {path: read_toml(path) for path in paths}
    with contextlib.suppress(TypeError):  # TOML has dates, JSON has none
        keep(kept, json.dumps(list(found.values())).encode())
    return found


def _states(paths: list[Path]) -> Iterator[bytes]:
    """The files' paths, sizes and times of change: another state of the files is another cache."""
    for path in paths:
        status = path.stat()
        yield f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode()
