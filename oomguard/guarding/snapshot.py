"""The memory snapshot that a guard or a loop of attempts is asked for: where it goes, and for which
failure it is taken.
"""

from __future__ import annotations

import os
from pathlib import Path

from oomguard.core.errors import SettingError
from oomguard.probe.snapshot_recorder import Recording
from oomguard.scan.exceptions import chain


def snapshot_path(given: str | Path | None) -> Path | None:
    """Return where the snapshot goes, None where none is asked for.

    Raises:
        SettingError: a folder, a file in none, and what is no path.
    """
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        path = Path(given).absolute()
    else:
        path = None
    if path is None or "\0" in str(path) or path.is_dir() or not path.parent.is_dir():
        if path is None:
            what = "is no path"
        elif path.is_dir():
            what = "is a folder"
        else:
            what = "its folder is not there"
        raise SettingError(
            f"snapshot={(given if path is None else str(given))!r}: {what}",
            hint="name a file in a folder that exists: snapshot.pickle",
        )
    return path


def take_at(error: BaseException, recording: Recording | None) -> None:
    """Take the snapshot where torch's allocator refused something and did not call for
    one itself.
    """
    if recording is not None and any(
        type(link).__name__ == "OutOfMemoryError" for link in chain(error)
    ):
        recording.take()
