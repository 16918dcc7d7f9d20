"""The one gateway to NVML: device memory as the driver reports it, None for what it
does not tell.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU; a field is None if the driver does not tell it."""

    index: int
    name: str | None
    total_bytes: int | None
    free_bytes: int | None
    used_bytes_by_pid: dict[int, int | None] | None


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One part of a GPU that is divided (MIG), by its number within that GPU; a field is None if
    the driver does not tell it.
    """

    number: int
    uuid: str | None
    name: str | None
    total_bytes: int | None
    free_bytes: int | None
    used_bytes_by_pid: dict[int, int | None] | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, and who it is.

    Attributes:
        device: its name and its memory.
        uuid: as CUDA_VISIBLE_DEVICES names it.
        is_divided: whether MIG is on, so that only its instances can be used; None where the driver
            does not tell.
        instances: these, as they are now: an administrator may change them at any time.
        failure: what the driver says of a GPU that does not answer ("GPU is lost"); None for one
            that does.
    """

    device: Device
    uuid: str | None
    is_divided: bool | None
    instances: tuple[MigInstance, ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """All GPUs that NVML tells of; ``failure`` is why it tells of none, None where it answers."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    failure: str | None = None


def survey() -> Survey:
    """Look at every GPU: who it is, how it is divided, what it holds, and what is wrong with it."""
    if not _has_library():
        return Survey(
            failure=(
                "libnvidia-ml.so.1 is not found: no NVIDIA driver, or a container that was not "
                "given its libraries"
            )
        )
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - whatever the binding raises, it is the answer
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
    """Return all GPUs, None if NVML is missing, fails to start or has no permission: unknown never
    means "no GPU".
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
    """NVML kept open for who asks it many times a second; ``uuids`` names each device
    as CUDA does.
    """

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
        """Open NVML; return None where it is missing or fails to start."""
        if not _has_library():
            return None
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # noqa: BLE001 - whatever the binding raises, the devices are unknown
            return None
        return cls(pynvml)

    def devices(self) -> tuple[Device, ...]:
        """Return what the devices say now, without their names."""
        return tuple(
            _memory_of(self._pynvml, index, handle) for index, handle in self._handles.items()
        )

    def end(self) -> None:
        """Close it."""
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
    """Return whether there may be NVML: on Linux by what the binding does first, which takes longer
    to load than to ask.

    Asked once: the loader looks through every folder of libraries where there is none.
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
    """Return the answer to one NVML call, None if the driver, the container or the version refuses
    it.
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
    except Exception as error:  # noqa: BLE001 - what it says is what is wrong with this one
        return Gpu(
            Device(index, None, None, None, None),
            None,
            None,
            failure=str(error) or type(error).__name__,
        )
    modes = _ask(
        pynvml.nvmlDeviceGetMigMode, handle
    )  # a GPU that cannot be divided does not support the question
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
    # A container hides process ids, and MIG hides sizes: an unknown size stays None.
    if running is None:
        by_pid = None
    else:
        by_pid = {p.pid: p.usedGpuMemory for p in running}
    total, free = (None, None) if memory is None else (int(memory.total), int(memory.free))
    return Device(index, None, total, free, by_pid)


def _text(name: Any) -> str | None:
    """Return a name as text, whichever the binding's version gives."""
    if isinstance(name, bytes):
        return name.decode(errors="replace")
    text: str | None = name
    return text
