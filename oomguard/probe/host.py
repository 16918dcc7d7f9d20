"""Read the host's limits: cgroups, WSL, containers, NUMA nodes, and exit statuses.

Every function takes the folder to start from, so that it can read a copy of another machine's
files. It returns None for unknown values: a missing or unreadable file never counts as zero.
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

# Only processor features that change an engine's memory are read.

_CPUINFO: Final = Path("/proc/cpuinfo")
_TILES: Final = "amx_tile"
_HALF_PRODUCTS: Final = "avx512_bf16"


def has_matrix_tiles() -> bool:
    """Return whether the processor has AMX tiles (Intel, from 2023), which change kernels.

    False if the kernel does not report it.
    """
    return _TILES in _flags()


def multiplies_in_bfloat16() -> bool:
    """Return whether it multiplies bfloat16 in AVX-512 (Intel from 2020, AMD from 2022).

    False if the kernel does not report it.
    """
    return _HALF_PRODUCTS in _flags()


@functools.cache
def _flags() -> frozenset[str]:
    try:
        lines = _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith("flags"):
            return frozenset(line.split())
    return frozenset()


# Host memory of this process, now and at its peak (proc(5): statm, status).

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_NOW: Final = "/proc/self/statm"
_PEAK: Final = b"VmHWM:"


class Resident:
    """Read this process's host memory many times a second, from an open file.

    Opening the file takes longer than reading it. In a fork, create another object, because this
    one would read the parent's memory.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(_NOW, os.O_RDONLY)
            self._identity = os.fstat(self._file)

    def bytes(self) -> int | None:
        """Return this process's bytes in host memory; None if the kernel does not report them."""
        try:
            if self._file is None:
                return None
            return int(os.pread(self._file, 256, 0).split()[1]) * _PAGE_BYTES
        except (
            OSError,
            ValueError,
            IndexError,
        ):  # a daemon that closes all its files has closed this one too
            return resident_bytes()

    def end(self) -> None:
        """Close the file, unless its descriptor now belongs to another file."""
        file = self._file
        self._file = None
        with contextlib.suppress(OSError):
            if file is not None and os.path.samestat(os.fstat(file), self._identity):
                os.close(file)


def resident_bytes() -> int | None:
    """Return this process's bytes in host memory; None if the kernel does not report them."""
    try:
        return int(_read(_NOW).split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def peak_resident_bytes() -> int | None:
    """Return this process's peak in host memory; None if the kernel does not report it."""
    try:
        return int(_read("/proc/self/status").partition(_PEAK)[2].split(maxsplit=1)[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None


def _read(path: str) -> bytes:
    """Return the content of a kernel file, which arrives in one piece."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, _PAGE_BYTES)
    finally:
        os.close(file)


ROOT: Final = Path("/")
# An unset v1 limit is the largest multiple of the page size below 2^63.
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
# Words in the first process's cgroup names, for containers that leave no file.
_CONTAINER_CGROUPS: Final = (
    ("Kubernetes", "kubepods"),
    ("Docker", "docker"),
    ("containerd", "containerd"),
    ("LXC", "lxc"),
)


@dataclass(frozen=True, slots=True)
class Cgroup:
    """Describe this process's memory controller; a size is None if unknown or unlimited.

    ``limited`` is None if no limit could be read, so that there may be one. ``oom_kills`` counts
    processes of the group that the kernel killed because memory ran out.
    """

    version: int
    limited: bool | None
    limit_bytes: int | None
    current_bytes: int | None
    oom_kills: int | None


def read_cgroup(root: Path = ROOT) -> Cgroup | None:
    """Read the effective memory limit: the least of the group and its parents.

    None without a memory controller.
    """
    listed = read_text(root / "proc/self/cgroup")
    if listed is None:
        return None
    groups = []
    for line in listed.splitlines():
        if line.count(":") >= 2:
            groups.append(line.split(":", 2))
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
    """Return the group's folder and its parents.

    In a container, the path may be the host's; then only the mount point is left.
    """
    parts = []
    for part in path.strip("/").split("/"):
        if part and part != "..":
            parts.append(part)
    chain = [mount.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]
    found = []
    for folder in chain:
        if is_folder(folder):
            found.append(folder)
    return found


def _read_v2(folders: list[Path]) -> Cgroup | None:
    limits = []
    for folder in folders:
        if (text := read_text(folder / "memory.max")) is not None:
            limits.append(text.strip())
    sizes = list(map(int, filter(str.isdecimal, limits)))
    current = _first(folders, "memory.current", r"\s*(\d+)")
    kills = _first(folders, "memory.events", r"(?m)^oom_kill (\d+)$")
    if not limits and current is None and kills is None:
        return None
    return Cgroup(2, bool(sizes) if limits else None, min(sizes, default=None), current, kills)


def _read_v1(folders: list[Path]) -> Cgroup | None:
    limits = []
    for folder in folders:
        if (text := read_text(folder / "memory.limit_in_bytes")) is not None:
            limits.append(text.strip())
    sizes = []
    for text in filter(str.isdecimal, limits):
        if int(text) < _NO_LIMIT_BYTES:
            sizes.append(int(text))
    current = _first(folders, "memory.usage_in_bytes", r"\s*(\d+)")
    kills = _first(folders, "memory.oom_control", r"(?m)^oom_kill (\d+)$")
    if not limits and current is None and kills is None:
        return None
    return Cgroup(1, bool(sizes) if limits else None, min(sizes, default=None), current, kills)


def _first(folders: list[Path], name: str, pattern: str) -> int | None:
    """Read a number from the nearest group with the file, because a group counts its children."""
    for folder in folders:
        match = re.search(pattern, read_text(folder / name) or "")
        if match:
            return int(match.group(1))
    return None


def read_text(path: Path) -> str | None:
    """Return a small file's text; None if it is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def is_folder(path: Path) -> bool:
    """Return whether a visible folder has this path."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def wsl_version(root: Path = ROOT) -> int | None:
    """Return 1 or 2 under the Windows Subsystem for Linux, and 0 elsewhere.

    None if the kernel's name is unreadable.
    """
    texts = []
    for name in ("version", "sys/kernel/osrelease"):
        if text := read_text(root / "proc" / name):
            texts.append(text)
    if not texts:
        return None
    text = " ".join(texts).lower()
    if "microsoft" not in text:
        # A kernel built by the user may have any name, but the interface to Windows programs
        # remains.
        if (root / "proc/sys/fs/binfmt_misc/WSLInterop").exists():
            return 2
        return 0
    if "wsl2" in text or "microsoft-standard" in text:
        return 2
    return 1


def containers(root: Path = ROOT, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the containers around this process, from marks of Docker, Kubernetes and others."""
    names = []
    for name, path in _CONTAINER_FILES:
        if _exists(root / path):
            names.append(name)
    for name, variable in _CONTAINER_VARIABLES:
        if (environ or {}).get(variable):
            names.append(name)
    groups = read_text(root / "proc/1/cgroup") or ""
    for name, word in _CONTAINER_CGROUPS:
        if word in groups:
            names.append(name)
    return tuple(dict.fromkeys(names))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def nvidia_driver(root: Path = ROOT) -> str | None:
    """Return the version of the loaded NVIDIA kernel driver; None if none is visible."""
    match = re.search(r"\b(\d{3,}\.[\d.]+)\b", read_text(root / "proc/driver/nvidia/version") or "")
    if match:
        return match.group(1)
    return None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """Describe one node of host memory; a size is None if the kernel does not report it."""

    number: int
    total_bytes: int | None
    free_bytes: int | None


def numa_nodes(root: Path = ROOT) -> tuple[NumaNode, ...] | None:
    """Return the host's NUMA nodes; None if the kernel lists none."""
    folder = root / "sys/devices/system/node"
    try:
        found = {}
        for child in folder.iterdir():
            if m := re.fullmatch(r"node(\d+)", child.name):
                found[int(m.group(1))] = child
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
    """Return the limit of ``ulimit -v`` in bytes: infinite without a limit, None if unknown."""
    return _limit("RLIMIT_AS")


def data_limit_bytes() -> float | None:
    """Return the limit of ``ulimit -d`` in bytes: infinite without a limit, None if unknown.

    Linux counts all writable private memory, not only the heap (since 4.7; getrlimit(2)).
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
    """Return the signal of an exit status (137 and -9: SIGKILL); None for another status."""
    if status < 0:
        number = -status
    else:
        number = status - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


def killed_for_memory(status: int, before: Cgroup | None, after: Cgroup | None) -> bool | None:
    """Return whether the kernel killed a process because memory ran out.

    That is a SIGKILL while the group's count of such kills increased.

    Args:
        status: how the process ended, as in a shell (137) or Python (-9).
        before: the process's memory controller at its start; None if unknown.
        after: the same at its end; None if unknown.

    Returns:
        None for a SIGKILL if no count distinguishes the kernel's kill from a user's.
    """
    if signal_of(status) != "SIGKILL":
        return False
    if before is None or after is None or before.oom_kills is None or after.oom_kills is None:
        return None
    return after.oom_kills > before.oom_kills


# Free host memory is the kernel's own estimate, within the limits of this process.


def read_available_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes that a new process can get without swapping; None if unknown."""
    free = _of_machine("MemAvailable", root)
    if free is None:
        sizes = []
    else:
        sizes = [free]
    group = read_cgroup(root)
    if group is not None and group.limit_bytes is not None and group.current_bytes is not None:
        sizes.append(max(0, group.limit_bytes - group.current_bytes))
    # A child of this process has the same limit.
    limit = address_space_limit_bytes()
    sizes += [int(limit)] if limit is not None and math.isfinite(limit) else []
    return min(sizes, default=None)


def read_data_limit_bytes() -> int | None:
    """Return the limit of private memory for a child of this process; None if unlimited."""
    limit = data_limit_bytes()
    if limit is not None and math.isfinite(limit):
        return int(limit)
    return None


def read_total_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes of the machine, or of the smaller control group; None if unknown."""
    group = read_cgroup(root)
    machine_bytes = _of_machine("MemTotal", root)
    if group is None or group.limit_bytes is None:
        return machine_bytes
    if machine_bytes is None:
        return group.limit_bytes
    return min(machine_bytes, group.limit_bytes)


def _of_machine(name: str, root: Path) -> int | None:
    found = re.search(rf"(?m)^{name}:\s+(\d+) kB", read_text(root / "proc/meminfo") or "")
    if found is None:
        return None
    return int(found.group(1)) * 1024
