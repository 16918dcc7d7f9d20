"""Check the environment variables that govern memory: their values, and mistakes in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from oomguard.core.records import Check

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
