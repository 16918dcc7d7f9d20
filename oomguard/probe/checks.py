"""Check this machine for ``oomguard doctor``: host memory, devices, and environment variables."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    nvidia_driver,
    read_cgroup,
    wsl_version,
)
from oomguard.probe.nvml import Device, Holder, vllm_orphans

# Host memory: WSL, containers, cgroups, /dev/shm, ulimit, NUMA.

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


# The devices: what NVML answers, the processes that use memory, and leftover processes.

# The driver itself uses memory without a process, but less than the larger of these two.
_UNSEEN_RATIO: Final = 0.05
_UNSEEN_BYTES: Final = GIB


def device_checks(
    devices: tuple[Device, ...] | None, holders: Mapping[int, Holder], root: Path
) -> Iterator[Check]:
    """Check NVML and each device.

    Args:
        devices: the devices; None if NVML does not answer.
        holders: the visible processes with device memory, by process id.
        root: the root of the file system, which contains the driver's files.
    """
    driver = nvidia_driver(root)
    if devices is None:
        from oomguard.probe.nvml import nvml_failure

        why = nvml_failure() or "NVML does not answer"
        text = f"NVML not available ({why}): device memory is unknown, not zero"
        if driver:
            yield Check(
                "nvml",
                "problem",
                f"{text}, although the NVIDIA driver {driver} is loaded",
                "nvidia-smi",
            )
        else:
            yield Check("nvml", "unknown", text, "nvidia-smi")
        return
    yield Check(
        "nvml",
        "ok",
        f"NVML answers{f', NVIDIA driver {driver}' if driver else ''}: {len(devices)} devices",
    )
    for device in devices:
        yield _device_check(device, holders)


def _device_check(device: Device, holders: Mapping[int, Holder]) -> Check:
    text = f"device {device.index}: {device.name or 'name unknown'}"
    if device.total_bytes is None or device.free_bytes is None:
        text += ", its memory is unknown (MIG, or no permission)"
        return Check("device", "unknown", text, "nvidia-smi -q -d MEMORY")
    text += f", {format_gib(device.free_bytes)} of {format_gib(device.total_bytes)} free"
    if device.used_bytes_by_pid is None:
        return Check(
            "device",
            "unknown",
            f"{text}; the processes that use the rest are unknown",
            "nvidia-smi",
        )
    held = [
        f"pid {pid} ({holders.get(pid, 'not seen from here')}) {_size(used)}"
        for pid, used in sorted(device.used_bytes_by_pid.items())
    ]
    if held:
        text += f"; used by {', '.join(held)}"
    sizes = device.used_bytes_by_pid.values()
    unseen = device.total_bytes - device.free_bytes - sum(used or 0 for used in sizes)
    if unseen > max(_UNSEEN_BYTES, _UNSEEN_RATIO * device.total_bytes) and None not in sizes:
        text += f"; {format_gib(unseen)} is used by processes that are not visible here"
        advice = "run nvidia-smi on the host, because a container sees only its own processes"
        return Check("device", "unknown", text, advice)
    return Check("device", "ok", text)


def left_over_checks(
    devices: tuple[Device, ...] | None, holders: Mapping[int, Holder]
) -> Iterator[Check]:
    """Check for orphaned vLLM processes, and for device memory of other users."""
    orphans, unseen = vllm_orphans()
    if orphans:
        names = ", ".join(f"{pid} ({name})" for pid, name in orphans.items())
        text = f"vLLM processes without the process that started them: {names}"
        yield Check("left_over", "problem", text, f"kill {' '.join(map(str, orphans))}")
    else:
        if unseen:
            where = " among the visible processes"
        else:
            where = ""
        yield Check("left_over", "ok", f"no vLLM process is left over{where}")
    others = [
        f"{holders[pid].user} (pid {pid}) {_size(used)} of device {device.index}"
        for device in devices or ()
        for pid, used in sorted((device.used_bytes_by_pid or {}).items())
        if pid in holders and not holders[pid].own
    ]
    if others:
        free = {d.free_bytes: d.index for d in devices or () if d.free_bytes is not None}
        if len(free) > 1:
            advice = f"export CUDA_VISIBLE_DEVICES={free[max(free)]}"
        else:
            advice = "ask these users to release it, or wait"
        yield Check(
            "left_over", "problem", f"other users use device memory: {', '.join(others)}", advice
        )


def _size(used_bytes: int | None) -> str:
    if used_bytes is None:
        return "an unknown size"
    return format_gib(used_bytes)


# The environment variables that govern memory: their values, and mistakes in them.

# torch 2.13's c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h, plus the options of
# torch 2.0 to 2.12.
_YES_NO_OPTIONS: Final = frozenset(
    {
        "expandable_segments",
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)
_ALLOCATOR_OPTIONS: Final = _YES_NO_OPTIONS | {
    "backend",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "roundup_bypass_threshold_mb",
    "roundup_power2_divisions",
}
# torch_npu has all of these options and some of its own.
_NPU_OPTIONS: Final = _ALLOCATOR_OPTIONS | {"base_addr_aligned_kb", "page_size", "segment_size_mb"}
# The name without a device works from 2.10 on; 2.9 prints it, but does not use it for CUDA.
_PLAIN_NAME_SINCE: Final = (2, 10)
PLAIN = "PYTORCH_ALLOC_CONF"
CUDA = "PYTORCH_CUDA_ALLOC_CONF"
HIP = "PYTORCH_HIP_ALLOC_CONF"
_ALLOCATORS: Final = {
    PLAIN: _ALLOCATOR_OPTIONS,
    CUDA: _ALLOCATOR_OPTIONS,
    HIP: _ALLOCATOR_OPTIONS,
    "PYTORCH_NPU_ALLOC_CONF": _NPU_OPTIONS,
}
_MIN_SPLIT_MB: Final = 20  # torch refuses less

_DEVICES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def allocator_checks(
    environ: Mapping[str, str], torch_version: str | None, *, wsl: bool = False
) -> tuple[Check, ...]:
    """Check each allocator variable that is set; without any, one check reports that.

    Args:
        environ: the environment.
        torch_version: the installed torch; None if unknown.
        wsl: whether this is the Windows Subsystem for Linux, where expandable segments do not work.
    """
    found = [
        Check("allocator", "problem", f"{name}={environ[name]}: {mistake}", advice)
        if mistake
        else Check("allocator", "ok", f"{name}={environ[name]}{note}", advice)
        for name in _ALLOCATORS
        if name in environ
        for mistake, note, advice in [_allocator(name, environ, torch_version, wsl)]
    ]
    found += [
        Check(
            "allocator",
            "problem" if mistake else "ok",
            f"{name}={environ[name]}: {mistake or meaning}",
            advice,
        )
        for name, read in _OTHERS.items()
        if name in environ
        for mistake, meaning, advice in [read(name, environ[name])]
    ]
    return tuple(found) or (Check("allocator", "ok", "allocator variables: none set"),)


def _allocator(
    name: str, environ: Mapping[str, str], torch_version: str | None, wsl: bool
) -> tuple[str, str, str]:
    """Return (mistake or "", note on a good value, advice) for one allocator variable."""
    value = environ[name]
    version = _major_minor(torch_version)
    mistake = _option_mistake(value, _ALLOCATORS[name])
    if mistake:
        return mistake, "", f"unset {name}"
    if wsl and re.search(r"expandable_segments\s*:\s*True", value):
        return "expandable segments do not work under WSL", "", f"unset {name}"
    if name == PLAIN and version is not None and version < _PLAIN_NAME_SINCE:
        return (
            f"torch {torch_version} ignores this name",
            "",
            f'export {CUDA}="${PLAIN}"; unset {PLAIN}',
        )
    if name == PLAIN and environ.get(CUDA, value) != value:
        return (
            f"{CUDA} has another value, and torch prefers that one for CUDA",
            "",
            f"unset {CUDA}",
        )
    if name == HIP and torch_version is not None and "rocm" not in torch_version:
        return (
            "",
            f" (for AMD devices; torch {torch_version} for NVIDIA devices does not read it)",
            "",
        )
    if name == CUDA and version is not None and version >= _PLAIN_NAME_SINCE:
        return (
            "",
            f" (the older name, which torch {torch_version} still reads)",
            f'export {PLAIN}="${CUDA}"; unset {CUDA}',
        )
    if name == PLAIN and version is None:
        return "", " (torch's version is unknown; before 2.10 it ignores this name)", ""
    return "", "", ""


def _option_mistake(value: str, known: Iterable[str]) -> str:
    """Return the mistake for which torch would refuse a list of options; "" if there is none."""
    for part in re.split(r",(?![^\[]*\])", value):
        option, colon, given = (text.strip() for text in part.partition(":"))
        if not option and not colon:
            continue
        if not colon or not given:
            return f"{part.strip()!r} is not option:value"
        if option not in known:
            import difflib

            near = difflib.get_close_matches(option, known, n=1)
            return f"unknown option {option!r}" + (f", did you mean {near[0]!r}?" if near else "")
        if option in _YES_NO_OPTIONS and given not in {"True", "False"}:
            return f"{option} must be True or False, not {given!r}"
        if option == "max_split_size_mb" and not (
            given.isdecimal() and int(given) >= _MIN_SPLIT_MB
        ):
            return f"{option} must be a whole number of at least {_MIN_SPLIT_MB}, not {given!r}"
        if option == "garbage_collection_threshold" and not 0 < (_number(given) or 0) < 1:
            return f"{option} must be between 0 and 1, not {given!r}"
    return ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _major_minor(version: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    if match:
        return (int(match.group(1)), int(match.group(2)))
    return None


def _mps_ratio(name: str, value: str) -> tuple[str, str, str]:
    number = _number(value)
    if number is None or number < 0:
        return "must be a number of at least 0", "", f"unset {name}"
    if number == 0 and "HIGH" in name:
        return (
            "",
            "0 removes the limit, so the whole system may run out of memory",
            f"unset {name}",
        )
    return "", f"{number:g} of the device's recommended working set", ""


def _fraction(name: str, value: str) -> tuple[str, str, str]:
    number = _number(value)
    if number is None or number <= 0:
        return "must be a share of the device's memory, above 0", "", f"export {name}=0.75"
    return "", f"JAX reserves this share of the device's memory ({number:g}) at its start", ""


def _plain(meaning: str) -> Callable[[str, str], tuple[str, str, str]]:
    return lambda _name, _value: ("", meaning, "")


_OTHERS: Final[dict[str, Callable[[str, str], tuple[str, str, str]]]] = {
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO": _mps_ratio,
    "PYTORCH_MPS_LOW_WATERMARK_RATIO": _mps_ratio,
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _plain(
        "torch keeps no memory for reuse, which is slow and meant for debugging"
    ),
    "XLA_PYTHON_CLIENT_MEM_FRACTION": _fraction,
    "XLA_PYTHON_CLIENT_PREALLOCATE": _plain(
        "whether JAX reserves its share at its start (75% if not set)"
    ),
    "XLA_PYTHON_CLIENT_ALLOCATOR": _plain("how JAX allocates memory"),
    "TF_FORCE_GPU_ALLOW_GROWTH": _plain("whether TensorFlow allocates memory only as needed"),
    "TF_GPU_ALLOCATOR": _plain("how TensorFlow allocates memory"),
    "VLLM_CPU_KVCACHE_SPACE": _plain("KV cache of vLLM's CPU backend, in GiB"),
}


def visible_devices_checks(
    environ: Mapping[str, str], device_count: int | None
) -> tuple[Check, ...]:
    """Check each variable that hides devices.

    ``device_count`` is None if NVML does not answer.
    """
    checks = [
        Check(
            "visible_devices",
            "problem" if mistake else "ok",
            f"{name}={environ[name]}: {mistake or meaning}",
            advice,
        )
        for name in _DEVICES
        if name in environ
        for mistake, meaning, advice in [
            _visible(name, environ[name], device_count if name == _DEVICES[0] else None)
        ]
    ]
    return tuple(checks) or (
        Check("visible_devices", "ok", f"{_DEVICES[0]} is not set: every device is visible"),
    )


# as above
def _visible(name: str, value: str, count: int | None) -> tuple[str, str, str]:
    """Return (mistake or "", meaning, advice) for a list of devices."""
    names = [text.strip() for text in value.split(",")]
    numbers = [int(text) for text in names if re.fullmatch(r"-?\d{1,9}", text)]
    show_all = f"unset {name}"
    if value.strip() in {"", "-1", "none", "void", "NoDevFiles"}:
        if count:
            return f"hides all {count} devices", "", show_all
        return "", "no device is visible", ""
    if len(set(names)) < len(names):
        return "names a device twice, so that no device is visible", "", show_all
    if any(number < 0 for number in numbers):
        return "hides every device after a negative number", "", show_all
    if count is not None and any(number >= count for number in numbers):
        return (
            (
                f"this machine has {count} devices, numbered from 0; "
                "every device after the first wrong number "
                "is hidden"
            ),
            "",
            show_all,
        )
    if len(numbers) < len(names) and not all(
        re.match(r"(?i)(?:GPU|MIG)-|\d+\Z|\d+:\d+\Z", text) for text in names
    ):
        return "must contain numbers, GPU-… or MIG-…", "", show_all
    return "", f"{len(names)} visible", ""
