"""Run tests on a simulated device with pytest: ``@pytest.mark.gpu_memory("8GiB")``.

The fixture ``gpu_memory`` is the device. The marker takes the keyword arguments of
``limit_memory``. They are checked when pytest collects the tests. torch is imported when the first
such test runs.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

import pytest

from oomguard.core.errors import SettingError
from oomguard.core.process import disabled
from oomguard.testing.wordings import format_size

if TYPE_CHECKING:
    from pluggy import Result

    from oomguard.testing.limit import DeviceLimit
    from oomguard.testing.simulated_device import SimulatedDevice


# A failed test on a simulated device shows the user's line, the peak, the device's size and the
# diagnosis.

_RAISES: Final = Path(__file__).parent / "simulated_device.py"
_INSTALLED: Final = tuple(
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_PACKAGE: Final = Path(__file__).parents[1]


def user_traceback(
    excinfo: pytest.ExceptionInfo[BaseException], config: pytest.Config
) -> TracebackType | None:
    """Return the traceback of a full device, up to the last line of the user's own code.

    None if another error was raised, if no line is the user's, or with ``--full-trace``.
    """
    entries: list[TracebackType] = []
    entry: TracebackType | None = excinfo.tb
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    if config.option.fulltrace or not entries or _file(entries[-1]) != _RAISES:
        return None
    # Frames of pytest and of installed packages are not the user's.
    own = []
    for number, entry in enumerate(entries):
        if _is_own(_file(entry)):
            own.append(number)
    users: TracebackType | None = None
    for entry in reversed(entries[: own[-1] + 1] if own else []):
        users = TracebackType(users, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return users


def _file(entry: TracebackType) -> Path:
    return Path(entry.tb_frame.f_code.co_filename)


def _is_own(path: Path) -> bool:
    if not path.is_absolute():
        return False
    return not any(map(path.is_relative_to, (*_INSTALLED, _PACKAGE)))


def report_section(device: SimulatedDevice, error: BaseException) -> str:
    """Return the lines of a failed test's report, with the diagnosis if memory ran out."""
    lines = [
        (
            f"peak {format_size(device.peak_bytes)} of {format_size(device.capacity_bytes)} on a "
            "simulated device"
        )
    ]
    if device.has_caching_allocator:
        lines.append(f"torch reserved {format_size(device.peak_reserved_bytes)} for it")
    if device.other_processes_bytes:
        lines.append(f"other processes used {format_size(device.other_processes_bytes)}")
    from oomguard.diagnosis import diagnose
    from oomguard.guarding.advice import note

    for incident in diagnose(error).incidents:
        if incident.is_oom:
            lines.append(note(incident))
    return "\n".join(lines)


MARKER: Final = "gpu_memory"
_LINE: Final = (
    f"{MARKER}(size, *, caching_allocator=False, other_processes=0, fail_at=(), wording=None): "
    "run the test on a simulated device of this size on the CPU (oomguard.testing.limit_memory)"
)
_DEVICE: Final = pytest.StashKey["SimulatedDevice"]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker for --strict-markers and ``pytest --markers``."""
    config.addinivalue_line("markers", _LINE)


# newer hook wrappers need pluggy 1.2, but this plugin supports pytest 7.0
@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Generator[None, Result[pytest.CollectReport]]:
    """Refuse a file or class with an invalid marker, and name each such test."""
    report = (yield).get_result()
    wrong: list[str] = []
    for node in report.result or ():
        if isinstance(node, pytest.Item):
            wrong += _mistakes(node)
    if report.passed and wrong:
        report.outcome, report.longrepr, report.result = "failed", "\n".join(wrong), []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin with a new device, also for a rerun; skip the test if oomguard is disabled."""
    if _DEVICE in item.stash:
        del item.stash[_DEVICE]
    marker = item.get_closest_marker(MARKER)
    if marker is not None:
        _leave_out_where_disabled()
        # A conftest may have added the marker after collection.
        _checked(marker)


@pytest.fixture(name=MARKER)
def device(request: pytest.FixtureRequest) -> SimulatedDevice:
    """Return the simulated device of a test marked ``gpu_memory``.

    ```python
    @pytest.mark.gpu_memory("8GiB")
    def test_fits(gpu_memory):
        assert gpu_memory.peak_bytes < 6 * 2**30
    ```

    An indirect parameter is the size: ``parametrize("gpu_memory", ["8GiB", "16GiB"],
    indirect=True)``.
    """
    if not hasattr(request, "param"):
        return _device(request.node)
    _leave_out_where_disabled()
    marker = request.node.get_closest_marker(MARKER)
    if marker is None:
        options = {}
    else:
        options = marker.kwargs
    return _device(
        request.node, getattr(pytest.mark, MARKER).with_args(request.param, **options).mark
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Run the test's own code on its device; a fixture's tensor counts after its first use."""
    if _DEVICE not in item.stash and item.get_closest_marker(MARKER) is None:
        yield
    else:
        with _device(item):
            yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Result[pytest.TestReport]]:
    """Add a section to a failed test: the peak, the device's size, and why memory ran out."""
    report = (yield).get_result()
    device = item.stash.get(_DEVICE, None)
    if report.when == "call" and report.failed and device is not None and call.excinfo is not None:
        if (ends := user_traceback(call.excinfo, item.config)) is not None:
            call.excinfo.traceback = type(call.excinfo.traceback)(ends)
            report.longrepr = item.repr_failure(call.excinfo)
        report.sections.append(("oomguard", report_section(device, call.excinfo.value)))


def _leave_out_where_disabled() -> None:
    if disabled():
        pytest.skip("OOMGUARD_DISABLE is set, so there is no simulated device")


def _mistakes(item: pytest.Item) -> Generator[str]:
    """Return the errors in a test's marker."""
    marker = item.get_closest_marker(MARKER)
    if marker is not None:
        try:
            _limit(marker)
        except SettingError as error:
            yield f"{item.nodeid}: {_message(error)}"


def _device(item: pytest.Item, asked: pytest.Mark | None = None) -> SimulatedDevice:
    """Return the item's device, always the same one; without ``asked``, use the closest marker."""
    if _DEVICE not in item.stash:
        marker = asked or item.get_closest_marker(MARKER)
        if marker is None:
            pytest.fail(
                f'the fixture {MARKER} needs a size: mark the test @pytest.mark.{MARKER}("8GiB")',
                pytrace=False,
            )
        try:
            item.stash[_DEVICE] = _checked(marker).device()
        except ModuleNotFoundError as error:
            from oomguard.core.installation import install_hint

            pytest.fail(
                f"a simulated device needs torch ({error}): {install_hint('hf')}", pytrace=False
            )
    return item.stash[_DEVICE]


def _checked(marker: pytest.Mark) -> DeviceLimit:
    """Return the device that a marker describes; fail the test with one line if it is invalid."""
    try:
        return _limit(marker)
    except SettingError as error:
        message = _message(error)
    pytest.fail(message, pytrace=False)


def _message(error: SettingError) -> str:
    if error.hint:
        return f"{error}; {error.hint}"
    return str(error)


def _limit(marker: pytest.Mark) -> DeviceLimit:
    from oomguard.testing.limit import read_limit

    try:
        return read_limit(*marker.args, **marker.kwargs)
    except TypeError as error:
        raise SettingError(
            f"{MARKER}: {str(error).removeprefix('read_limit() ')}",
            hint=f'@pytest.mark.{MARKER}("8GiB")',
        ) from None
