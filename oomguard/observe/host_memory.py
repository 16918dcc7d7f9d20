"""What the host's memory has free for a process of this user: the kernel's own estimate, within its limits."""

from __future__ import annotations

import math
import re
from pathlib import Path

from oomguard.observe.host import ROOT, address_space_limit_bytes, read_cgroup, read_text


def read_available_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes that a new process can have without swapping, None where the kernel does not tell it."""
    found = re.search(r"(?m)^MemAvailable:\s+(\d+) kB", read_text(root / "proc/meminfo") or "")
    sizes = [] if found is None else [int(found.group(1)) * 1024]
    group = read_cgroup(root)
    if group is not None and group.limit_bytes is not None and group.current_bytes is not None:
        sizes.append(max(0, group.limit_bytes - group.current_bytes))
    limit = address_space_limit_bytes()
    if limit is not None and math.isfinite(limit):
        sizes.append(int(limit))
    return min(sizes, default=None)
