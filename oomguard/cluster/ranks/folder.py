"""Where the documents lie: a folder that all ranks see, one file a rank, written whole or not at
all.

Ranks of other hosts, which do not see the folder, are brought there by a mirror (mirror.py): what
it brings lies in ``there``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Final

# How the folders begin that are made here: hidden, so that none counts as a file that the command
# may have written.
OWN_NAME: Final = ".oomguard-ranks-"
_HERE: Final = "here"
_THERE: Final = "there"
_END: Final = ".json"
_MOST_BYTES: Final = 4 << 20


class Folder:
    """The documents of one job.

    Args:
        path: the folder; it is made, for this user alone, where it is not there.

    Raises:
        OSError: it cannot be made, or another user may write it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: dict[Path, tuple[tuple[int, int, int], str]] = {}
        self._make()
        for folder in (path.parent, path):
            status = folder.stat(follow_symlinks=False)
            if folder.name.startswith(OWN_NAME) and (
                status.st_uid != os.geteuid() or status.st_mode & 0o022
            ):
                raise PermissionError(errno.EPERM, "others may write it", str(folder))

    def _make(self) -> None:
        for folder in (self.path.parent, self.path, self.here, self.there):
            folder.mkdir(mode=0o700, parents=folder == self.path.parent, exist_ok=True)

    @property
    def here(self) -> Path:
        """Where ranks that see the folder write."""
        return self.path / _HERE

    @property
    def there(self) -> Path:
        """Where a mirror puts what the others say."""
        return self.path / _THERE

    def write(self, rank: int, text: str) -> None:
        """Write a rank's document so that nobody reads half of it, and a host that dies leaves it
        whole. Raises OSError.
        """
        self._make()  # the last rank of an earlier job may just have removed it
        partial = self.here / f"{rank}.{os.getpid()}"
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.here / f"{rank}{_END}")

    def read(self) -> dict[int, str]:
        """Return every rank's document; a file that has not changed is not read again."""
        found: dict[int, str] = {}
        for folder in (self.there, self.here):
            with (
                contextlib.suppress(OSError),
                os.scandir(folder) as entries,
            ):  # a listing, so that NFS asks its server
                for entry in entries:
                    name, dot, end = entry.name.partition(".")
                    if (
                        dot + end == _END
                        and name.isdigit()
                        and (text := self._text(Path(entry.path))) is not None
                    ):
                        found[int(name)] = text
        return found

    def withdraw(self, rank: int) -> None:
        """Remove a rank's document. Raises OSError."""
        (self.here / f"{rank}{_END}").unlink(missing_ok=True)

    def written_here(self) -> set[int]:
        """Return the ranks that see the folder and have written into it."""
        return {int(path.stem) for path in self.here.glob(f"*{_END}") if path.stem.isdigit()}

    def _text(self, path: Path) -> str | None:
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                state = status.st_ino, status.st_mtime_ns, status.st_size
                known = self._seen.get(path)
                if known is not None and known[0] == state:
                    return known[1]
                text = file.read(_MOST_BYTES).decode("utf-8", "replace")
        except OSError:
            return None
        self._seen[path] = state, text
        return text

    def remove(self) -> None:
        """Remove it: no rank reads it any more. The one above goes too where it was made for it and
        is empty.
        """
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.parent.name.startswith(OWN_NAME):
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()
