"""Read device memory from NVML, and find the processes that use it or that an engine left behind.

Values that the driver does not report are None.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from oomguard.probe.host import ROOT


@dataclass(frozen=True, slots=True)
class Device:
    """Describe one GPU; a field is None if the driver does not report it."""

    index: int
    name: str | None
    total_bytes: int | None
    free_bytes: int | None
    used_bytes_by_pid: dict[int, int | None] | None


@dataclass(frozen=True, slots=True)
class MigInstance:
    """Describe one MIG instance by its number in its GPU; unreported fields are None."""

    number: int
    uuid: str | None
    name: str | None
    total_bytes: int | None
    free_bytes: int | None
    used_bytes_by_pid: dict[int, int | None] | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """Describe one GPU with its identity.

    Attributes:
        device: its name and memory.
        uuid: its name in CUDA_VISIBLE_DEVICES; None if unknown.
        is_divided: whether MIG is on, so that only its instances are usable; None if unknown.
        instances: its current instances, which an administrator may change at any time.
        failure: the driver's reason why the GPU does not answer ("GPU is lost"); None if it
            answers.
    """

    device: Device
    uuid: str | None
    is_divided: bool | None
    instances: tuple[MigInstance, ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """Hold all GPUs that NVML reports; ``failure`` is the reason if there are none."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    failure: str | None = None


def survey() -> Survey:
    """Return every GPU with its identity, MIG instances, memory and failures."""
    if not _has_library():
        return Survey(
            failure=(
                "libnvidia-ml.so.1 was not found: the machine has no NVIDIA driver, or the "
                "container has no access to its libraries"
            )
        )
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - any exception of the binding is the answer
        return Survey(failure=str(error) or type(error).__name__)
    try:
        driver = _text(_ask(pynvml.nvmlSystemGetDriverVersion))
        try:
            count = pynvml.nvmlDeviceGetCount()
        except Exception as error:  # noqa: BLE001 - as above
            return Survey(driver=driver, failure=str(error) or type(error).__name__)
        return Survey(tuple(_gpu(pynvml, index) for index in range(count)), driver)
    finally:
        _ask(pynvml.nvmlShutdown)


def devices() -> tuple[Device, ...] | None:
    """Return all GPUs; None if NVML is missing, fails to start, or refuses access.

    None never means that there is no GPU.
    """
    if not _has_library():
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - whatever the binding raises, the devices are unknown
        return None
    try:
        count = _ask(pynvml.nvmlDeviceGetCount)
        if count is None:
            return None
        return tuple(_device(pynvml, index) for index in range(count))
    finally:
        _ask(pynvml.nvmlShutdown)


class Session:
    """Keep NVML open for many reads a second; ``uuids`` are the device names in CUDA."""

    def __init__(self, pynvml: Any) -> None:
        self._pynvml = pynvml
        count = _ask(pynvml.nvmlDeviceGetCount) or 0
        handles = {index: _ask(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)}
        self._handles = {index: handle for index, handle in handles.items() if handle is not None}
        uuids = {
            index: _ask(pynvml.nvmlDeviceGetUUID, handle) for index, handle in self._handles.items()
        }
        self.uuids = {index: _text(uuid) for index, uuid in uuids.items()}

    @classmethod
    def begin(cls) -> Session | None:
        """Open NVML; return None if it is missing or fails to start."""
        if not _has_library():
            return None
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # noqa: BLE001 - whatever the binding raises, the devices are unknown
            return None
        return cls(pynvml)

    def devices(self) -> tuple[Device, ...]:
        """Return the current state of the devices, without their names."""
        return tuple(
            _memory_of(self._pynvml, index, handle) for index, handle in self._handles.items()
        )

    def end(self) -> None:
        """Close NVML."""
        _ask(self._pynvml.nvmlShutdown)


def nvml_failure() -> str | None:
    """Return why NVML does not answer, in one line; None if it answers."""
    try:
        import pynvml
    except Exception as error:  # noqa: BLE001
        # a broken installation raises anything, and all of it is the answer
        return f"nvidia-ml-py cannot be imported: {error}"
    try:
        pynvml.nvmlInit()
        try:
            pynvml.nvmlDeviceGetCount()
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:  # noqa: BLE001 - the binding has exceptions of several families
        return str(error) or type(error).__name__
    return None


@functools.cache
def _has_library() -> bool:
    """Return whether NVML may exist; on Linux this loads its library, as the binding does.

    The result is cached, because without a library the loader searches every folder.
    """
    if sys.platform != "linux":
        return True
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _ask(function: Any, *args: Any) -> Any:
    """Return the result of one NVML call.

    None if the driver, the container or the version refuses it.
    """
    try:
        return function(*args)
    except Exception:  # noqa: BLE001
        # the binding has exceptions of several families, and none may reach the user
        return None


def _device(pynvml: Any, index: int) -> Device:
    handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return Device(index, None, None, None, None)
    return replace(
        _memory_of(pynvml, index, handle), name=_text(_ask(pynvml.nvmlDeviceGetName, handle))
    )


def _gpu(pynvml: Any, index: int) -> Gpu:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        pynvml.nvmlDeviceGetUUID(handle)
    except Exception as error:  # noqa: BLE001 - its text says what is wrong with this GPU
        return Gpu(
            Device(index, None, None, None, None),
            None,
            None,
            failure=str(error) or type(error).__name__,
        )
    modes = _ask(
        pynvml.nvmlDeviceGetMigMode, handle
    )  # a GPU without MIG does not support the question
    if modes:
        is_divided = bool(modes[0])
    else:
        is_divided = False
    device = _device(pynvml, index)
    uuid = _text(_ask(pynvml.nvmlDeviceGetUUID, handle))
    return Gpu(device, uuid, is_divided, tuple(_instances(pynvml, handle)) if is_divided else ())


def _instances(pynvml: Any, gpu: Any) -> Iterator[MigInstance]:
    for number in range(_ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu) or 0):
        handle = _ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, number)
        if handle is not None:  # the numbers have gaps
            own = _memory_of(pynvml, number, handle)
            name = _text(_ask(pynvml.nvmlDeviceGetName, handle))
            uuid = _text(_ask(pynvml.nvmlDeviceGetUUID, handle))
            yield MigInstance(
                number, uuid, name, own.total_bytes, own.free_bytes, own.used_bytes_by_pid
            )


def _memory_of(pynvml: Any, index: int, handle: Any) -> Device:
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    running = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    # A container hides process ids, and MIG hides sizes. An unknown size stays None.
    if running is None:
        by_pid = None
    else:
        by_pid = {p.pid: p.usedGpuMemory for p in running}
    total, free = (None, None) if memory is None else (int(memory.total), int(memory.free))
    return Device(index, None, total, free, by_pid)


def _text(name: Any) -> str | None:
    """Return a name as text, which older bindings return as bytes."""
    if isinstance(name, bytes):
        return name.decode(errors="replace")
    text: str | None = name
    return text


# The number of the first namespace of process ids in the Linux kernel.
_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"


@dataclass(frozen=True, slots=True)
class Holder:
    """Describe a process with device memory; ``own`` is True if it belongs to this user."""

    name: str
    user: str
    own: bool

    def __str__(self) -> str:
        return f"{self.name}, {self.user}"


def sees_host_pids(root: Path = ROOT) -> bool | None:
    """Return whether process ids here are the host's, which NVML uses; None if unknown."""
    try:
        return str((root / "proc/self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE
    except (OSError, ValueError):
        return None


def memory_holders(
    devices: tuple[Device, ...] | None, *, host_pids: bool | None = None
) -> dict[int, Holder]:
    """Return the visible processes with device memory, by process id.

    Args:
        devices: the devices from NVML; None if it does not answer.
        host_pids: whether process ids here are the host's; None asks the kernel. If they are not,
            the result is empty, because the same number means another process here.
    """
    import psutil

    found: dict[int, Holder] = {}
    if not (sees_host_pids() if host_pids is None else host_pids):
        return found
    for pid in {pid for device in devices or () for pid in device.used_bytes_by_pid or ()}:
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            process = psutil.Process(pid)
            user = process.username()
            found[pid] = Holder(process.name(), user, user == psutil.Process().username())
    return found


def vllm_orphans() -> tuple[dict[int, str], bool]:
    """Return vLLM processes without an engine as parent, and whether some were unreadable.

    vLLM names its processes ``VLLM::...``. A process that outlives its parent keeps its device
    memory.

    Returns:
        The titles by process id, and whether some processes were unreadable.
    """
    import psutil

    orphans = {}
    unseen = False
    for process in psutil.process_iter(["pid", "name", "cmdline", "ppid"]):
        words = process.info["cmdline"]
        unseen = unseen or words is None
        title = (words or [""])[0] or process.info["name"] or ""
        if (
            title.startswith("VLLM::")
            and "APIServer" not in title
            and not is_engine(process.info["ppid"])
        ):
            orphans[process.info["pid"]] = title
    return orphans, unseen


def is_engine(pid: int | None) -> bool:
    """Return whether a process can be an engine's parent: Python, vLLM or Ray.

    True if the process is unreadable.
    """
    import psutil

    if pid is None:
        return True
    try:
        parent = psutil.Process(pid)
        words = [parent.name(), *parent.cmdline()[:3]]
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError, ValueError):
        return True
    return any(mark in word.lower() for word in words for mark in ("python", "vllm", "ray"))
