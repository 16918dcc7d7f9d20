"""Which file system a path lies on, and whether another machine may have it mounted too."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any, Final

MOUNTS: Final = Path("/proc/self/mountinfo")


@functools.cache
def store_data() -> dict[str, Any]:
    """Return what store.toml says."""
    return tomllib.loads(Path(__file__).with_name("store.toml").read_text(encoding="utf-8"))


def network_file_system(path: Path) -> str | None:
    """Return the type of the file system where it is one that several machines share; None of a local one, and where nothing tells."""
    kind = _file_system(path)
    return kind if kind in store_data()["network_file_systems"] else None


def _file_system(path: Path) -> str | None:
    """Return the type of the file system that is mounted deepest above a path (proc_pid_mountinfo(5))."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        place = path.resolve()
    except OSError:
        return None
    deepest, kind = -1, None
    for line in lines:
        own, _, rest = line.partition(" - ")
        words = own.split(" ")
        if len(words) < 5 or not rest:
            continue
        mounted = Path(words[4].encode("latin-1", "surrogateescape").decode("unicode_escape"))
        # Of two mounts on one folder the later one is on top.
        if place.is_relative_to(mounted) and len(mounted.parts) >= deepest:
            deepest, kind = len(mounted.parts), rest.split(" ")[0]
    return kind
