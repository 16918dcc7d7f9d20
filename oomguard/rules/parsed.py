"""The shipped rule files as tables, read once: parsing ninety TOML files takes longer than diagnosing a short log."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import platformdirs

from oomguard.rules.table import read_toml


def read_tables(root: Path) -> dict[Path, dict[str, Any]]:
    """Every file under ``root`` and its table, sorted by path; kept in the user's cache until a file changes.

    Raises RuleError for a file that cannot be read.
    """
    paths = sorted(root.rglob("*.toml"))
    kept = _cache_file(paths)
    with contextlib.suppress(OSError, ValueError):
        tables = json.loads(kept.read_text(encoding="utf-8"))
        if isinstance(tables, list) and len(tables) == len(paths):
            return dict(zip(paths, tables, strict=True))
    found = {path: read_toml(path) for path in paths}
    with contextlib.suppress(OSError, TypeError):  # a cache that cannot be written is none
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(list(found.values())), encoding="utf-8")
        partial.replace(kept)
    return found


def _cache_file(paths: list[Path]) -> Path:
    """Named after the files' paths, sizes and times of change: another state of the files is another cache."""
    about = hashlib.sha256()
    for path in paths:
        status = path.stat()
        about.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return Path(platformdirs.user_cache_dir("oomguard")) / f"rules-{about.hexdigest()[:32]}.json"
