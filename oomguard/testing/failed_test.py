"""What a failed test on a simulated device shows: the user's line, the peak beside the device's size, and the diagnosis."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from oomguard.testing.sizes import written

if TYPE_CHECKING:
    import pytest

    from oomguard.testing.simulated_device import SimulatedDevice

_RAISES: Final = Path(__file__).parent / "simulated_device.py"
_INSTALLED: Final = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGE: Final = Path(__file__).parents[1]


def users_part(excinfo: pytest.ExceptionInfo[BaseException], config: pytest.Config) -> TracebackType | None:
    """Return the traceback of a full device up to the last line of the user's own; what is installed lies below that.

    None where another than the device raised, where no line is the user's, or with ``--full-trace``.
    """
    entries: list[TracebackType] = []
    entry: TracebackType | None = excinfo.tb
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    if config.option.fulltrace or not entries or _file(entries[-1]) != _RAISES:
        return None
    own = [i for i, entry in enumerate(entries) if _is_own(_file(entry))]
    users: TracebackType | None = None
    for entry in reversed(entries[: own[-1] + 1] if own else []):
        users = TracebackType(users, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return users


def _file(entry: TracebackType) -> Path:
    return Path(entry.tb_frame.f_code.co_filename)


def _is_own(path: Path) -> bool:
    return path.is_absolute() and not any(path.is_relative_to(folder) for folder in (*_INSTALLED, _PACKAGE))


def section(device: SimulatedDevice, error: BaseException) -> str:
    """Return the lines of a report; the diagnosis stands in them where memory ran out."""
    lines = [f"peak {written(device.peak_bytes)} of {written(device.capacity_bytes)} on a simulated device"]
    if device.has_caching_allocator:
        lines.append(f"torch held {written(device.peak_reserved_bytes)} for it")
    if device.other_processes_bytes:
        lines.append(f"other processes held {written(device.other_processes_bytes)}")
    from oomguard.diagnosing import diagnose
    from oomguard.report.note import note

    lines += [note(incident) for incident in diagnose(error).incidents if incident.is_oom]
    return "\n".join(lines)
