"""Read about the host: cgroup limits, WSL, containers, NUMA nodes, what an exit status means.

Every function takes the folder to start from, so that it can read a copy of another machine's
files, and returns None for what cannot be known: a file that is missing or may not be read never
counts as zero.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# What this machine's processor can do, as far as an engine's memory depends on it.

_CPUINFO: Final = Path("/proc/cpuinfo")
_TILES: Final = "amx_tile"
_HALF_PRODUCTS: Final = "avx512_bf16"


def has_matrix_tiles() -> bool:
    """Return whether it has AMX's tiles (Intel, from 2023): engines choose other kernels there.
    False where nothing tells.
    """
    return _TILES in _flags()


def multiplies_in_bfloat16() -> bool:
    """Return whether it multiplies bfloat16 in AVX-512 (Intel from 2020, AMD from 2022). False
    where nothing tells.
    """
    return _HALF_PRODUCTS in _flags()


@functools.cache
def _flags() -> frozenset[str]:
    try:
        lines = _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


# How much of the host's memory this process has: now, and at most in its whole life (proc(5):
# statm, status).

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_NOW: Final = "/proc/self/statm"
_PEAK: Final = b"VmHWM:"


class Resident:
    """What the kernel tells of this process, kept open for who asks many times a second: opening
    takes longer than reading.

    In a fork it would tell of the parent: make another one there.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(_NOW, os.O_RDONLY)
            self._identity = os.fstat(self._file)

    def bytes(self) -> int | None:
        """Return the bytes of this process that are in the host's memory, None where the kernel
        does not tell.
        """
        try:
            if self._file is None:
                return None
            return int(os.pread(self._file, 256, 0).split()[1]) * _PAGE_BYTES
        except (
            OSError,
            ValueError,
            IndexError,
        ):  # a program that closes every file, as a daemon does, closed this one too
            return resident_bytes()

    def end(self) -> None:
        """Close it, unless its number is another file's by now."""
        file = self._file
        self._file = None
        with contextlib.suppress(OSError):
            if file is not None and os.path.samestat(os.fstat(file), self._identity):
                os.close(file)


def resident_bytes() -> int | None:
    """Return the bytes of this process that are in the host's memory, None where the kernel does
    not tell.
    """
    try:
        return int(_read(_NOW).split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def peak_resident_bytes() -> int | None:
    """Return the most that this process ever had there, None where the kernel does not tell."""
    try:
        return int(_read("/proc/self/status").partition(_PEAK)[2].split(maxsplit=1)[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None


def _read(path: str) -> bytes:
    """Return what the kernel tells in a file of its own, which it gives in one piece."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, _PAGE_BYTES)
    finally:
        os.close(file)


ROOT: Final = Path("/")
# A v1 limit that nobody set is the largest multiple of the page size below 2^63.
_NO_LIMIT_BYTES: Final = 1 << 62
_CONTAINER_FILES: Final = (
    ("Docker", ".dockerenv"),
    ("Podman", "run/.containerenv"),
    ("Kubernetes", "var/run/secrets/kubernetes.io/serviceaccount"),
)
_CONTAINER_VARIABLES: Final = (
    ("Kubernetes", "KUBERNETES_SERVICE_HOST"),
    ("Apptainer", "APPTAINER_CONTAINER"),
    ("Singularity", "SINGULARITY_CONTAINER"),
)
# Words in the names of the first process's cgroups, for containers that leave no file.
_CONTAINER_CGROUPS: Final = (
    ("Kubernetes", "kubepods"),
    ("Docker", "docker"),
    ("containerd", "containerd"),
    ("LXC", "lxc"),
)


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The memory controller of this process; a size is None if the kernel does not tell it or sets
    no limit.

    ``limited`` is None if no limit could be read, which does not mean that none is set.
    ``oom_kills`` counts the processes of the group that the kernel killed for memory.
    """

    version: int
    limited: bool | None
    limit_bytes: int | None
    current_bytes: int | None
    oom_kills: int | None


def read_cgroup(root: Path = ROOT) -> Cgroup | None:
    """Read the memory limit in force, the least of the group's own and those above it; None without
    a memory controller.
    """
    listed = read_text(root / "proc/self/cgroup")
    if listed is None:
        return None
    groups = [line.split(":", 2) for line in listed.splitlines() if line.count(":") >= 2]
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):
            found = _read_v1(_folders(root / "sys/fs/cgroup/memory", path))
            if found is not None:
                return found
    for number, controllers, path in groups:
        if number == "0" and not controllers:
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                found = _read_v2(_folders(root / mount, path))
                if found is not None:
                    return found
    return None


def _folders(mount: Path, path: str) -> list[Path]:
    """Return the group's folder and those above it: the mount alone if, in a container, the path is
    the host's.
    """
    parts = [part for part in path.strip("/").split("/") if part and part != ".."]
    chain = [mount.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]
    return [folder for folder in chain if is_folder(folder)]


def _read_v2(folders: list[Path]) -> Cgroup | None:
    limits = [
        text.strip() for folder in folders if (text := read_text(folder / "memory.max")) is not None
    ]
    sizes = [int(text) for text in limits if text.isdecimal()]
    current = _first(folders, "memory.current", r"\s*(\d+)")
    kills = _first(folders, "memory.events", r"(?m)^oom_kill (\d+)$")
    if not limits and current is None and kills is None:
        return None
    return Cgroup(2, bool(sizes) if limits else None, min(sizes, default=None), current, kills)


def _read_v1(folders: list[Path]) -> Cgroup | None:
    limits = [
        text.strip()
        for folder in folders
        if (text := read_text(folder / "memory.limit_in_bytes")) is not None
    ]
    sizes = [int(text) for text in limits if text.isdecimal() and int(text) < _NO_LIMIT_BYTES]
    current = _first(folders, "memory.usage_in_bytes", r"\s*(\d+)")
    kills = _first(folders, "memory.oom_control", r"(?m)^oom_kill (\d+)$")
    if not limits and current is None and kills is None:
        return None
    return Cgroup(1, bool(sizes) if limits else None, min(sizes, default=None), current, kills)


def _first(folders: list[Path], name: str, pattern: str) -> int | None:
    """Read a number in the nearest group that has the file: a group counts what its
    children did.
    """
    for folder in folders:
        match = re.search(pattern, read_text(folder / name) or "")
        if match:
            return int(match.group(1))
    return None


def read_text(path: Path) -> str | None:
    """Return a small file's text, None if it is missing or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def is_folder(path: Path) -> bool:
    """Return whether a folder of this name can be seen."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def wsl_version(root: Path = ROOT) -> int | None:
    """Return 1 or 2 under the Windows Subsystem for Linux, 0 elsewhere, None if the kernel's name
    cannot be read.
    """
    texts = [
        text
        for name in ("version", "sys/kernel/osrelease")
        if (text := read_text(root / "proc" / name))
    ]
    if not texts:
        return None
    text = " ".join(texts).lower()
    if "microsoft" not in text:
        # A kernel that the user built has any name; the door to Windows programs stays.
        if (root / "proc/sys/fs/binfmt_misc/WSLInterop").exists():
            return 2
        return 0
    if "wsl2" in text or "microsoft-standard" in text:
        return 2
    return 1


def containers(root: Path = ROOT, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the containers around this process, by the marks that Docker, Podman, Kubernetes and
    others leave.
    """
    names = [name for name, path in _CONTAINER_FILES if _exists(root / path)]
    names += [name for name, variable in _CONTAINER_VARIABLES if (environ or {}).get(variable)]
    groups = read_text(root / "proc/1/cgroup") or ""
    names += [name for name, word in _CONTAINER_CGROUPS if word in groups]
    return tuple(dict.fromkeys(names))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def nvidia_driver(root: Path = ROOT) -> str | None:
    """Return the version of the loaded NVIDIA kernel driver, None if no driver can be seen."""
    match = re.search(r"\b(\d{3,}\.[\d.]+)\b", read_text(root / "proc/driver/nvidia/version") or "")
    if match:
        return match.group(1)
    return None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One node of the host's memory; a size is None if the kernel does not tell it."""

    number: int
    total_bytes: int | None
    free_bytes: int | None


def numa_nodes(root: Path = ROOT) -> tuple[NumaNode, ...] | None:
    """Return the host's NUMA nodes, None if the kernel lists none."""
    folder = root / "sys/devices/system/node"
    try:
        found = {
            int(m.group(1)): child
            for child in folder.iterdir()
            if (m := re.fullmatch(r"node(\d+)", child.name))
        }
    except OSError:
        return None
    return tuple(_numa_node(number, found[number]) for number in sorted(found)) or None


def _numa_node(number: int, folder: Path) -> NumaNode:
    text = read_text(folder / "meminfo") or ""
    total, free = (re.search(rf"{name}:\s+(\d+) kB", text) for name in ("MemTotal", "MemFree"))
    return NumaNode(
        number,
        int(total.group(1)) * 1024 if total else None,
        int(free.group(1)) * 1024 if free else None,
    )


def address_space_limit_bytes() -> float | None:
    """Return the limit that ``ulimit -v`` sets on this process: infinite for no limit, None if it
    cannot be asked.
    """
    return _limit("RLIMIT_AS")


def data_limit_bytes() -> float | None:
    """Return the limit that ``ulimit -d`` sets on this process: infinite for no limit, None if it
    cannot be asked.

    Linux counts all private memory that can be written, not only the heap (since 4.7;
    getrlimit(2)).
    """
    return _limit("RLIMIT_DATA")


def _limit(name: str) -> float | None:
    try:
        import resource

        soft, _ = resource.getrlimit(getattr(resource, name))
    except (ImportError, AttributeError, OSError, ValueError):
        return None
    if soft == resource.RLIM_INFINITY:
        return math.inf
    return soft


def signal_of(status: int) -> str | None:
    """Return the signal that an exit status stands for (137 and -9: SIGKILL), None for any other
    status.
    """
    if status < 0:
        number = -status
    else:
        number = status - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


def killed_for_memory(status: int, before: Cgroup | None, after: Cgroup | None) -> bool | None:
    """Return whether the kernel ended a process for memory: by SIGKILL, while the group's count of
    kills rose.

    Args:
        status: how the process ended, as a shell (137) or Python (-9) tells it.
        before: the process's memory controller when it started.
        after: the same when it had ended.

    Returns:
        None for a SIGKILL if no count tells the kernel's kill from a person's.
    """
    if signal_of(status) != "SIGKILL":
        return False
    if before is None or after is None or before.oom_kills is None or after.oom_kills is None:
        return None
    return after.oom_kills > before.oom_kills


# What the host's memory has free for a process of this user: the kernel's own estimate, within its
# limits.


def read_available_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes that a new process can have without swapping, None where the kernel does not
    tell it.
    """
    free = _of_machine("MemAvailable", root)
    if free is None:
        sizes = []
    else:
        sizes = [free]
    group = read_cgroup(root)
    if group is not None and group.limit_bytes is not None and group.current_bytes is not None:
        sizes.append(max(0, group.limit_bytes - group.current_bytes))
    limit = address_space_limit_bytes()  # a process that this one starts has it too
    sizes += [int(limit)] if limit is not None and math.isfinite(limit) else []
    return min(sizes, default=None)


def read_data_limit_bytes() -> int | None:
    """Return the private memory that a process may have which this one starts, None where it is not
    limited.
    """
    limit = data_limit_bytes()
    if limit is not None and math.isfinite(limit):
        return int(limit)
    return None


def read_total_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes of the machine, or of the control group below it; None where the kernel does
    not tell it.
    """
    group = read_cgroup(root)
    sizes = (_of_machine("MemTotal", root), None if group is None else group.limit_bytes)
    return min((size for size in sizes if size is not None), default=None)


def _of_machine(name: str, root: Path) -> int | None:
    found = re.search(rf"(?m)^{name}:\s+(\d+) kB", read_text(root / "proc/meminfo") or "")
    if found is None:
        return None
    return int(found.group(1)) * 1024
