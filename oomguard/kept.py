"""What oomguard keeps between runs: records in the user's state folder, and in the cache folder what is costly to make."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import platformdirs


def kept_file(name: str, about: Iterable[bytes]) -> Path:
    """Where a file made of ``about`` is kept; ``name`` holds ``{}``, where the hash of all of it goes."""
    digest = hashlib.sha256()
    for part in about:
        digest.update(part + b"\0")
    return Path(platformdirs.user_cache_dir("oomguard")) / name.format(digest.hexdigest()[:32])


def state_file(name: str) -> Path:
    """Where a record of runs is kept: in the user's state folder (``XDG_STATE_HOME`` respected)."""
    return Path(platformdirs.user_state_dir("oomguard", appauthor=False)) / name


def keep(path: Path, content: bytes) -> None:
    """Write a file for the next time, whole or not at all; a cache that cannot be written is none."""
    with contextlib.suppress(OSError):
        write_whole(path, content)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file in one step, so that no reader sees half of it; raises OSError, and leaves nothing behind then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
