"""Read and write the files that oomguard keeps for the user.

Records of runs go to the state folder; results that are costly to compute go to the cache folder.
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

# A stranger may have put a file there, so oomguard reads regular files only, up to a stated number
# of bytes, and never waits. A device may never end, a FIFO waits for a writer, and a link can lead
# to either. This module imports nothing of ours.

_KINDS: Final[tuple[tuple[Callable[[int], bool], str], ...]] = (
    (stat.S_ISDIR, "is a folder"),
    (stat.S_ISFIFO, "is a FIFO"),
    (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
)
# Step for a file that reports no size, or that grew after oomguard asked for its size.
_STEP_BYTES: Final = 1 << 16


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: if oomguard cannot open it or it is not a regular file; ``strerror`` says which.
    """
    # Check before opening, because opening a device may have an effect, and again afterwards.
    try:
        _check(Path(path).stat().st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:
        # A null byte in the name.
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
        most_bytes: the size limit, in bytes.

    Raises:
        OSError: if it is unreadable, not a regular file, or longer; ``strerror`` says which.
    """
    with open_regular(path) as stream:
        # A file of a kernel file system has no size, and any other file may grow. The limit
        # therefore applies to the bytes that were read.
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes <= most_bytes:
            content = _read(stream, size_bytes, most_bytes)
        else:
            content = None
    if content is None or len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"is larger than {most_bytes} bytes")
    return content


def _read(stream: IO[bytes], size_bytes: int, most_bytes: int) -> bytes:
    """Read at most ``most_bytes`` + 1 bytes, in steps.

    A single read of that length would allocate the whole limit at once.
    """
    content = stream.read(min(size_bytes, most_bytes) + 1)
    while len(content) <= most_bytes and (
        more := stream.read(min(_STEP_BYTES, most_bytes + 1 - len(content)))
    ):
        content += more
    return content


def _check(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "is of a kind that cannot be read"
        for is_kind, name in _KINDS:
            if is_kind(mode):
                kind = name
                break
        raise OSError(errno.EINVAL, f"{kind}, not a file")


_MAX_KEPT_BYTES: Final = 64 << 20
# Only the user may see which commands the user runs.
OWN_FOLDER: Final = 0o700
_BELOW_HOME: Final = {"cache": ".cache", "config": ".config", "state": ".local/state"}


def cache_file(name: str, about: Iterable[bytes]) -> Path:
    """Return the path of the cache file for the content ``about``.

    Args:
        name: the file name; ``{}`` in it becomes the hash of ``about``.
        about: everything that the cached result depends on.
    """
    digest = hashlib.sha256()
    for part in about:
        digest.update(part + b"\0")
    return user_folder("cache") / name.format(digest.hexdigest()[:32])


def state_file(name: str) -> Path:
    """Return the path of a record in the user's state folder (``XDG_STATE_HOME`` is respected)."""
    return user_folder("state") / name


def user_folder(kind: Literal["cache", "config", "state"]) -> Path:
    """Return the user's folder of a kind.

    Common cases do not use platformdirs, because importing it takes longer than most of a start.
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
    """Create a folder and its parents, but never the home folder itself.

    Raises:
        OSError: if the home folder is missing, or the folder cannot be created.
    """
    home = Path(os.environ.get("HOME") or "/")
    if folder.is_relative_to(home) and not home.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the home folder is not there", str(home))
    folder.mkdir(parents=True, exist_ok=True, mode=mode)


def write_cache(path: Path, content: bytes) -> None:
    """Write a cache file completely or not at all. A failed write has no effect."""
    with contextlib.suppress(OSError):
        write_whole(path, content, folder_mode=OWN_FOLDER)


def write_whole(path: Path, content: bytes, *, folder_mode: int = 0o777) -> None:
    """Write a file in one step, so that no reader sees half of it.

    An existing file keeps its permissions. A failed write leaves no file behind.

    Args:
        path: the file.
        content: its new content.
        folder_mode: permissions of a folder that has to be created.

    Raises:
        OSError: if the file cannot be written.
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
    # A start that finds its tables in the cache does not need it.
    import tomllib

    return tomllib.loads(path.read_text(encoding="utf-8"))


def read_tables(
    name: str, paths: Sequence[Path], read: Callable[[Path], dict[str, Any]] = _toml
) -> dict[Path, dict[str, Any]]:
    """Read data files as tables, from the cache if no file has changed.

    Parsing TOML takes far longer than reading the cache.

    Args:
        name: the name of the set of files; the cache file starts with it.
        paths: the files, in the order of the result.
        read: the parser of one file; its exceptions are raised.
    """
    kept = cache_file(f"{name}-{{}}.json", map(state_of, paths))
    with contextlib.suppress(OSError, ValueError, RecursionError):
        tables = json.loads(read_regular(kept, _MAX_KEPT_BYTES))
        if (
            isinstance(tables, list)
            and len(tables) == len(paths)
            and all(isinstance(one, dict) for one in tables)
        ):
            return dict(zip(paths, tables, strict=True))
    found = {path: read(path) for path in paths}
    # TOML has dates, but JSON does not.
    with contextlib.suppress(TypeError):
        write_cache(kept, json.dumps(list(found.values())).encode())
    return found


def state_of(path: Path) -> bytes:
    """Return a file's path, size and modification time, which together identify its content."""
    status = path.stat()
    return f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode()
