"""A file that the user asks for, by a name of the user's: written whole, or left as it was."""

from __future__ import annotations

import errno
from os import PathLike
from pathlib import Path
from typing import Final

from oomguard.errors import UsageError
from oomguard.user_files import write_whole

_OPEN_FILES: Final = {Path("/dev"), Path("/proc")}  # /dev/stdout may be a file, and others write to it too
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OTHER_PICTURES: Final = {".pdf", ".svg", ".jpg", ".jpeg", ".gif", ".webp", ".tif", ".tiff", ".bmp", ".eps", ".html"}


def refuse_other_format(path: str | PathLike[str]) -> None:
    """Raise UsageError if a PNG's name ends in the suffix of another format: viewers would call the file damaged."""
    suffix = Path(path).suffix.lower()
    if suffix in _OTHER_PICTURES:
        raise UsageError(
            f"{path}: to_png writes PNG, and {suffix} is another format",
            hint=f"name it {Path(path).with_suffix('.png')}; seen.plot().savefig(path) writes matplotlib's other formats",
        )


def write(path: str | PathLike[str], content: bytes) -> None:
    """Write a file in a folder that is there; a pipe or a device is written to as it is.

    Raises:
        UsageError: it cannot be written; what was there before is as it was.
    """
    named = Path(path)
    try:
        if (named.exists() and not named.is_file()) or _OPEN_FILES & {*named.absolute().parents}:
            with named.open("ab") as file:
                file.write(content)
            return
        target = named.resolve()  # a link stays one
        if not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        write_whole(target, content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint=_hint(error, len(content))) from None


def _hint(error: OSError, size_bytes: int) -> str:
    if error.errno in _NO_ROOM:
        return f"make room for {size_bytes:,} bytes, or name a file on another disk; nothing there was changed"
    if isinstance(error, PermissionError):
        return "name a file in a folder in which you may write"
    return "name a file in a folder that is there"
