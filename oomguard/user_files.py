"""Files that oomguard keeps for the user: records of runs in the state folder, in the cache folder what is costly to make."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from oomguard.regular_file import read_regular

_MAX_KEPT_BYTES: Final = 64 << 20
# What commands a user runs is nobody else's business.
OWN_FOLDER: Final = 0o700
_BELOW_HOME: Final = {"cache": ".cache", "config": ".config", "state": ".local/state"}


def kept_file(name: str, about: Iterable[bytes]) -> Path:
    """Where a file made of ``about`` is kept; ``name`` holds ``{}``, where the hash of all of it goes."""
    digest = hashlib.sha256()
    for part in about:
        digest.update(part + b"\0")
    return user_folder("cache") / name.format(digest.hexdigest()[:32])


def state_file(name: str) -> Path:
    """Where a record of runs is kept: in the user's state folder (``XDG_STATE_HOME`` respected)."""
    return user_folder("state") / name


def user_folder(kind: Literal["cache", "config", "state"]) -> Path:
    """Where files of a kind lie; platformdirs, which loads longer than most of a start takes, is asked in odd cases only."""
    if sys.platform == "linux":
        named, home = os.environ.get(f"XDG_{kind.upper()}_HOME", ""), os.environ.get("HOME", "")
        if Path(named).is_absolute():
            return Path(named) / "oomguard"
        if Path(home).is_absolute() and not named:
            return Path(home) / _BELOW_HOME[kind] / "oomguard"
    import platformdirs

    asked = {
        "cache": platformdirs.user_cache_dir,
        "config": platformdirs.user_config_dir,
        "state": platformdirs.user_state_dir,
    }
    return Path(asked[kind]("oomguard", appauthor=False))


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder, and those above it up to the home folder: one that is not there is not ours to make. Raises OSError."""
    home = Path(os.environ.get("HOME") or "/")
    if folder.is_relative_to(home) and not home.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the home folder is not there", str(home))
    folder.mkdir(parents=True, exist_ok=True, mode=mode)


def keep(path: Path, content: bytes) -> None:
    """Write a file for the next time, whole or not at all; do without a cache that cannot be written."""
    with contextlib.suppress(OSError):
        write_whole(path, content, folder_mode=OWN_FOLDER)


def write_whole(path: Path, content: bytes, *, folder_mode: int = 0o777) -> None:
    """Write a file in one step, so that no reader sees half of it; raises OSError, and leaves nothing behind then.

    The rights of a file that was there stay; ``folder_mode`` is of a folder that has to be made.
    """
    make_folder(path.parent, folder_mode)
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        partial.write_bytes(content)
        with contextlib.suppress(FileNotFoundError):
            partial.chmod(path.stat().st_mode)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _toml(path: Path) -> dict[str, Any]:
    import tomllib  # a start that finds its tables in the cache does without

    return tomllib.loads(path.read_text(encoding="utf-8"))


def read_tables(
    name: str, paths: Sequence[Path], read: Callable[[Path], dict[str, Any]] = _toml
) -> dict[Path, dict[str, Any]]:
    """Read data files as tables, from the cache while none of them has changed: parsing TOML takes far longer.

    Args:
        name: what the files are; the cache file starts with it.
        paths: the files, in the order of the result.
        read: parses one file; what it raises is raised.
    """
    kept = kept_file(f"{name}-{{}}.json", map(state_of, paths))
    with contextlib.suppress(OSError, ValueError, RecursionError):
        tables = json.loads(read_regular(kept, _MAX_KEPT_BYTES))
        if isinstance(tables, list) and len(tables) == len(paths) and all(isinstance(one, dict) for one in tables):
            return dict(zip(paths, tables, strict=True))
    found = {path: read(path) for path in paths}
    with contextlib.suppress(TypeError):  # TOML has dates, JSON has none
        keep(kept, json.dumps(list(found.values())).encode())
    return found


def state_of(path: Path) -> bytes:
    """Return a file's path, size and time of change: another state of it is another cache."""
    status = path.stat()
    return f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode()
