"""Check the limits of host memory: WSL, containers, cgroups, /dev/shm, ulimit, NUMA."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.core.facts import GIB, format_gib
from oomguard.core.records import Check
from oomguard.probe.host import (
    ROOT,
    Cgroup,
    address_space_limit_bytes,
    containers,
    data_limit_bytes,
    numa_nodes,
    read_cgroup,
    wsl_version,
)

_LOW_RATIO: Final = 0.05  # a smaller free share is a problem
_SHM: Final = "/dev/shm"  # noqa: S108 - only read, never written
_SMALL_SHM_BYTES: Final = (
    GIB  # Docker gives 64 MiB, but the processes of one engine pass tensors through it
)


def host_checks(environ: Mapping[str, str], root: Path = ROOT) -> Iterator[Check]:
    """Check every limit of the host whose files are below ``root``."""
    inside = containers(root, environ)
    yield wsl_check(wsl_version(root))
    yield Check(
        "container",
        "ok",
        f"container: {', '.join(inside)}" if inside else "container: none detected",
    )
    yield cgroup_check(read_cgroup(root))
    yield from memory_checks()
    yield shm_check(root, inside)
    yield address_space_check(address_space_limit_bytes())
    yield data_check(data_limit_bytes())
    yield numa_check(root)


def wsl_check(version: int | None) -> Check:
    """Check whether this is Windows' Linux, where some fixes do not work; None means unknown."""
    if version is None:
        return Check("wsl", "unknown", "WSL: the kernel's name is unreadable")
    if version == 0:
        return Check("wsl", "ok", "WSL: no")
    return Check(
        "wsl",
        "ok",
        f"WSL{version}: expandable segments do not work, NVML hides processes, and .wslconfig "
        "limits the memory",
        "set memory= under [wsl2] in %UserProfile%\\.wslconfig, then wsl --shutdown",
    )


def cgroup_check(group: Cgroup | None) -> Check:
    """Check the control group's memory limit, its use, and kills by the kernel."""
    if group is None:
        return Check(
            "cgroup", "unknown", "cgroup: no memory controller is readable, so a limit is unknown"
        )
    text = f"cgroup v{group.version}: "
    if group.limited is None:
        text += "the limit is unknown"
    elif group.limit_bytes is None:
        text += "no memory limit"
    else:
        text += f"{format_gib(group.limit_bytes)} is the limit"
    if group.current_bytes is None:
        text += ", the used memory is unknown"
    else:
        text += f", {format_gib(group.current_bytes)} used"
    text += f", oom_kill count {'unknown' if group.oom_kills is None else group.oom_kills}"
    raise_it = (
        "raise the memory limit: docker run --memory, or resources.limits.memory in Kubernetes"
    )
    if group.oom_kills:
        return Check(
            "cgroup",
            "problem",
            f"{text}: the kernel killed processes of this group because memory ran out",
            raise_it,
        )
    if (
        group.limit_bytes
        and group.current_bytes
        and group.current_bytes > (1 - _LOW_RATIO) * group.limit_bytes
    ):
        # The count includes the page cache, which the kernel frees automatically.
        return Check("cgroup", "unknown", f"{text}: nearly full (including page cache)", raise_it)
    return Check("cgroup", "ok" if group.limited is not None else "unknown", text)


def memory_checks() -> Iterator[Check]:
    """Check the free host memory and swap."""
    import psutil

    for name, read, advice in (
        ("host memory", psutil.virtual_memory, "ps aux --sort=-rss | head"),
        ("swap", psutil.swap_memory, "free -h"),
    ):
        try:
            found: Any = read()
        except Exception as error:  # noqa: BLE001 - psutil raises any exception of the platform
            yield Check("host_memory", "unknown", f"{name}: {error}", advice)
            continue
        free = getattr(found, "available", found.free)
        text = f"{name}: {format_gib(free)} of {format_gib(found.total)} free"
        if name == "swap":
            yield Check("host_memory", "ok", text if found.total else "swap: none")
        elif free < _LOW_RATIO * found.total:
            yield Check("host_memory", "problem", f"{text}: almost nothing is free", advice)
        else:
            yield Check("host_memory", "ok", text)


def shm_check(root: Path, inside: tuple[str, ...], small_bytes: float = _SMALL_SHM_BYTES) -> Check:
    """Check the size of shared memory, through which an engine's processes pass tensors.

    Args:
        root: the root of the host's files.
        inside: the containers around this process.
        small_bytes: a smaller total is a problem.
    """
    try:
        found = shutil.disk_usage(root / _SHM.lstrip("/"))
    except (OSError, ValueError):
        return Check("shm", "unknown", f"{_SHM} is unreadable")
    text = f"{_SHM}: {format_gib(found.free)} of {format_gib(found.total)} free"
    if found.total >= small_bytes:
        return Check("shm", "ok", text)
    kubernetes = "Kubernetes" in inside
    if kubernetes:
        advice = f"mount an emptyDir with medium: Memory at {_SHM}"
    else:
        advice = "docker run --ipc=host, or --shm-size=8g"
    return Check(
        "shm", "problem", f"{text}: too small for an engine with several processes", advice
    )


def address_space_check(limit_bytes: float | None) -> Check:
    """Check ``ulimit -v`` in bytes (None if unknown): CUDA reserves more addresses than memory."""
    return _ulimit_check(
        "address_space",
        "-v",
        limit_bytes,
        "of addresses, but CUDA reserves more addresses than there is memory",
    )


def data_check(limit_bytes: float | None) -> Check:
    """Check ``ulimit -d`` in bytes (None if unknown): on a CPU, all engine memory counts."""
    bounds = "of private memory for each process, which on a CPU is all memory of an engine"
    return _ulimit_check("data_segment", "-d", limit_bytes, bounds)


def _ulimit_check(name: str, flag: str, limit_bytes: float | None, bounds: str) -> Check:
    if limit_bytes is None:
        return Check(name, "unknown", f"ulimit {flag} is unreadable")
    if math.isinf(limit_bytes):
        return Check(name, "ok", f"ulimit {flag}: unlimited")
    return Check(
        name,
        "problem",
        f"ulimit {flag}: {format_gib(limit_bytes)} {bounds}",
        f"ulimit {flag} unlimited",
    )


def numa_check(root: Path) -> Check:
    """List the NUMA nodes, because vLLM's CPU backend counts the memory of one node."""
    nodes = numa_nodes(root)
    if nodes is None:
        return Check("numa", "unknown", "NUMA nodes: the kernel lists none")
    sizes = [
        f"node {node.number} "
        f"{'unknown' if node.total_bytes is None else format_gib(node.total_bytes)}"
        + ("" if node.free_bytes is None else f" ({format_gib(node.free_bytes)} unused)")
        for node in nodes
    ]
    known = all(node.total_bytes is not None for node in nodes)
    return Check("numa", "ok" if known else "unknown", f"NUMA nodes: {', '.join(sizes)}")
