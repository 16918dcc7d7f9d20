"""A memory limit for tests and benchmarks: a control group of this machine, where it may be made."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def _file(name_v1: str, name_v2: str) -> str:
    return name_v1 if _V1.is_dir() else name_v2


@contextlib.contextmanager
def limited_group(limit_mib: int) -> Iterator[Path | None]:
    """Make a control group with a limit, and remove it afterwards; None where that is not allowed."""
    folder = (_V1 if _V1.is_dir() else _V2) / f"oomguard-{uuid.uuid4().hex[:12]}"
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    try:
        (folder / _file("memory.limit_in_bytes", "memory.max")).write_text(str(limit_mib << 20))
        yield folder
    except OSError:
        yield None
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def wrapped(group: Path, command: list[str]) -> list[str]:
    """Return the command as it runs within a control group."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]


def kernel_kills(group: Path) -> int:
    """Return how many processes of the group the kernel has killed because memory ran out."""
    text = (group / _file("memory.oom_control", "memory.events")).read_text()
    return int(text.rpartition("oom_kill ")[2].split()[0])


def most_bytes(group: Path) -> int:
    """Return the most memory that the group has had."""
    return int((group / _file("memory.max_usage_in_bytes", "memory.peak")).read_text())


def pids(group: Path) -> list[int]:
    """Return the processes of the group."""
    return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
