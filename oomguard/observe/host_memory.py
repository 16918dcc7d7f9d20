"""What the host's memory has free for a process of this user: the kernel's own estimate, within its limits."""

from __future__ import annotations

import math
import re
from pathlib import Path

from oomguard.observe.host import ROOT, address_space_limit_bytes, data_limit_bytes, read_cgroup, read_text


def read_available_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes that a new process can have without swapping, None where the kernel does not tell it."""
    free = _of_machine("MemAvailable", root)
    sizes = [] if free is None else [free]
    group = read_cgroup(root)
    if group is not None and group.limit_bytes is not None and group.current_bytes is not None:
        sizes.append(max(0, group.limit_bytes - group.current_bytes))
    limit = address_space_limit_bytes()  # a process that this one starts has it too
    sizes += [int(limit)] if limit is not None and math.isfinite(limit) else []
    return min(sizes, default=None)


def read_data_limit_bytes() -> int | None:
    """Return the private memory that a process may have which this one starts, None where it is not limited."""
    limit = data_limit_bytes()
    return int(limit) if limit is not None and math.isfinite(limit) else None


def read_total_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes of the machine, or of the control group below it; None where the kernel does not tell it."""
    group = read_cgroup(root)
    sizes = (_of_machine("MemTotal", root), None if group is None else group.limit_bytes)
    return min((size for size in sizes if size is not None), default=None)


def _of_machine(name: str, root: Path) -> int | None:
    found = re.search(rf"(?m)^{name}:\s+(\d+) kB", read_text(root / "proc/meminfo") or "")
    return None if found is None else int(found.group(1)) * 1024
