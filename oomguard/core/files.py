"""Files that oomguard keeps for the user: records of runs in the state folder, in the cache folder
what is costly to make.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any, Final, Literal

# Reading a file that a stranger may have put there: regular files only, up to a stated number of
# bytes, and without waiting.
#
# A device may never end, a FIFO waits for somebody who writes, and a link leads to either. This
# file imports nothing from the package.

_KINDS: Final[tuple[tuple[Callable[[int], bool], str], ...]] = (
    (stat.S_ISDIR, "is a folder"),
    (stat.S_ISFIFO, "is a FIFO"),
    (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
)
# Of a file that has no size, or has grown since it was asked for.
_STEP_BYTES: Final = 1 << 16


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: it cannot be opened or is of another kind; ``strerror`` says which.
    """
    # Looked at before it is opened, since opening a device may do something, and again once it is
    # open.
    try:
        _check(Path(path).stat().st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # a null byte in the name
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        _check(os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: the file, or a link to it.
        most_bytes: the bytes that it may have.

    Raises:
        OSError: it cannot be read, is of another kind, or is longer; ``strerror`` says which.
    """
    with open_regular(path) as stream:
        # A file of a kernel's file system has no size, and any other may grow: what counts is what
        # is read.
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes <= most_bytes:
            content = _read(stream, size_bytes, most_bytes)
        else:
            content = None
    if content is None or len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"is larger than {most_bytes} bytes")
    return content


def _read(stream: IO[bytes], size_bytes: int, most_bytes: int) -> bytes:
    """Return what is in a file, one byte more than ``most_bytes`` at most; asked for at once, so
    much would be allocated.
    """
    content = stream.read(min(size_bytes, most_bytes) + 1)
    while len(content) <= most_bytes and (
        more := stream.read(min(_STEP_BYTES, most_bytes + 1 - len(content)))
    ):
        content += more
    return content


def _check(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next(
            (name for is_kind, name in _KINDS if is_kind(mode)), "is of a kind that cannot be read"
        )
        raise OSError(errno.EINVAL, f"{kind}, not a file")


_MAX_KEPT_BYTES: Final = 64 << 20
# What commands a user runs is nobody else's business.
OWN_FOLDER: Final = 0o700
_BELOW_HOME: Final = {"cache": ".cache", "config": ".config", "state": ".local/state"}


def kept_file(name: str, about: Iterable[bytes]) -> Path:
    """Where a file made of ``about`` is kept; ``name`` holds ``{}``, where the hash of all of it
    goes.
    """
    digest = hashlib.sha256()
    for part in about:
        digest.update(part + b"\0")
    return user_folder("cache") / name.format(digest.hexdigest()[:32])


def state_file(name: str) -> Path:
    """Where a record of runs is kept: in the user's state folder (``XDG_STATE_HOME`` respected)."""
    return user_folder("state") / name


def user_folder(kind: Literal["cache", "config", "state"]) -> Path:
    """Where files of a kind lie; platformdirs, which loads longer than most of a start takes, is
    asked in odd cases only.
    """
    if sys.platform == "linux":
        named = os.environ.get(f"XDG_{kind.upper()}_HOME", "")
        home = os.environ.get("HOME", "")
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
    """Make a folder, and those above it up to the home folder: one that is not there is not ours to
    make. Raises OSError.
    """
    home = Path(os.environ.get("HOME") or "/")
    if folder.is_relative_to(home) and not home.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the home folder is not there", str(home))
    folder.mkdir(parents=True, exist_ok=True, mode=mode)


def keep(path: Path, content: bytes) -> None:
    """Write a file for the next time, whole or not at all; do without a cache that cannot be
    written.
    """
    with contextlib.suppress(OSError):
        write_whole(path, content, folder_mode=OWN_FOLDER)


def write_whole(path: Path, content: bytes, *, folder_mode: int = 0o777) -> None:
    """Write a file in one step, so that no reader sees half of it; raises OSError, and leaves
    nothing behind then.

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
    """Read data files as tables, from the cache while none of them has changed: parsing TOML takes
    far longer.

    Args:
        name: what the files are; the cache file starts with it.
        paths: the files, in the order of the result.
        read: parses one file; what it raises is raised.
    """
    kept = kept_file(f"{name}-{{}}.json", map(state_of, paths))
    with contextlib.suppress(OSError, ValueError, RecursionError):
        tables = json.loads(read_regular(kept, _MAX_KEPT_BYTES))
        if (
            isinstance(tables, list)
            and len(tables) == len(paths)
            and all(isinstance(one, dict) for one in tables)
        ):
            return dict(zip(paths, tables, strict=True))
    found = {path: read(path) for path in paths}
    with contextlib.suppress(TypeError):  # TOML has dates, JSON has none
        keep(kept, json.dumps(list(found.values())).encode())
    return found


def state_of(path: Path) -> bytes:
    """Return a file's path, size and time of change: another state of it is another cache."""
    status = path.stat()
    return f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode()
