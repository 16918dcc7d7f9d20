"""pytest with oomguard's plugin, in processes of their own: the marker, the fixture, the report, and what stays untouched."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).parents[2]
PLUGIN = ("-p", "oomguard.testing.pytest_plugin")
TESTS = """
import unittest
import pytest, torch
from oomguard.testing import active_device

@pytest.fixture
def weights():
    assert active_device() is None
    return torch.zeros(1 << 20)

@pytest.mark.gpu_memory("8MiB")
def test_fits(weights, gpu_memory):
    assert gpu_memory is active_device()
    assert gpu_memory.capacity_bytes == 8 << 20
    assert gpu_memory.live_bytes == 0
    weights.sum()
    assert gpu_memory.peak_bytes == (4 << 20) + 4
    gpu_memory.reset_peak()

@pytest.mark.gpu_memory("8MiB", caching_allocator=True, other_processes="2MiB")
def test_too_much():
    torch.zeros(1 << 10)
    torch.zeros(1 << 24)

@pytest.mark.gpu_memory("8MiB")
def test_wrong():
    torch.zeros(1 << 20)
    assert 1 == 2

def test_no_marker(gpu_memory):
    pass

def test_unmarked():
    assert active_device() is None

@pytest.mark.parametrize("mib", [pytest.param(n, marks=pytest.mark.gpu_memory(f"{n}MiB")) for n in (2, 3)])
def test_card(mib, gpu_memory):
    assert gpu_memory.capacity_bytes == mib << 20

@pytest.mark.gpu_memory("8MiB")
class TestAll:
    def test_of_the_class(self, gpu_memory):
        assert gpu_memory.capacity_bytes == 8 << 20

    @pytest.mark.gpu_memory("9MiB", fail_at=1)
    def test_its_own(self, gpu_memory):
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1)

@pytest.mark.gpu_memory("8MiB", fail_at=1)
def test_again(gpu_memory):
    assert gpu_memory.allocations == 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1)

@pytest.mark.gpu_memory("8MiB")
class TestOld(unittest.TestCase):
    def test_method(self):
        with self.assertRaises(torch.OutOfMemoryError):
            torch.zeros(1 << 24)

@pytest.mark.gpu_memory("16MiB", other_processes="1MiB")
@pytest.mark.parametrize("gpu_memory", ["8MiB", 4 << 20], indirect=True)
def test_beside_a_marker(gpu_memory):
    assert gpu_memory is active_device()
    assert gpu_memory.capacity_bytes in (8 << 20, 4 << 20)
    assert gpu_memory.other_processes_bytes == 1 << 20

@pytest.mark.parametrize("gpu_memory", ["8MiB"], indirect=True)
def test_alone(gpu_memory):
    assert gpu_memory is active_device() and gpu_memory.capacity_bytes == 8 << 20

@pytest.mark.parametrize("gpu_memory", ["8 potatoes"], indirect=True)
def test_no_size(gpu_memory): pass

@pytest.mark.parametrize("gpu_memory", [8])
def test_an_argument_of_its_own(gpu_memory):
    assert gpu_memory == 8 and active_device() is None
"""

# Runs one test twice, as plugins do that run a failed test again.
TWICE = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    if item.name == "test_again":
        assert all(report.passed for report in runtestprotocol(item, log=False, nextitem=None))
"""


def run(
    folder: Path, *arguments: str, tests: str = TESTS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run pytest on a file of tests, with no plugin but those that are named."""
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -W error --strict-markers --strict-config -q\n"
    )
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "100"} | variables
    env.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "conftest.py").write_text(TWICE)
    return run(folder, *PLUGIN, "-rA", "--tb=short")


def test_marked_tests_run_on_their_device_and_no_other_test_does(ran):
    passed = {
        line.split("::", 1)[1] for line in ran.stdout.splitlines() if line.startswith("PASSED")
    }
    assert passed == {
        "test_fits",
        "test_unmarked",
        "test_card[2]",
        "test_card[3]",
        "TestAll::test_of_the_class",
        "TestAll::test_its_own",
        "test_again",
        "TestOld::test_method",
        "test_beside_a_marker[8MiB]",
        "test_beside_a_marker[4194304]",
        "test_alone[8MiB]",
        "test_an_argument_of_its_own[8]",
    }


def test_test_out_of_memory_shows_peak_limit_and_diagnosis(
    ran,
):
    report = ran.stdout.split("_ test_too_much _")[1].split("_ test_wrong _")[0]
    assert (
        "peak 4.00 KiB of 8.00 MiB on a simulated device\ntorch reserved 2.00 MiB for it\nother processes used 2.00 MiB"
        in report
    )
    assert (
        "oomguard: CUDA out of memory: 64.00 MiB requested, 6.00 MiB of 8.00 MiB free\n  why: "
        in report
    )
    assert "simulated_device.py" not in report


def test_test_that_fails_otherwise_shows_only_the_peak(ran):
    report = ran.stdout.split("_ test_wrong _")[1].split("short test summary")[0]
    assert "peak 4.00 MiB of 8.00 MiB on a simulated device" in report
    assert "why:" not in report


def test_the_fixture_without_a_marker_says_what_to_write(ran):
    assert (
        'the fixture gpu_memory needs a size: mark the test @pytest.mark.gpu_memory("8GiB")'
        in ran.stdout
    )
    assert "ERROR test_it.py::test_no_marker" in ran.stdout


WRONG = """
import pytest
@pytest.mark.gpu_memory("8 potatoes")
def test_size(): pass
@pytest.mark.gpu_memory("8GiB", other_processes="9GiB")
def test_others(): pass
@pytest.mark.gpu_memory("8GiB", colour="red")
def test_option(): pass
@pytest.mark.gpu_memory
def test_nothing(): pass
"""


def test_markers_without_a_device_are_named_at_collection(tmp_path):
    wrong = run(tmp_path, *PLUGIN, tests=WRONG)
    assert wrong.returncode in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.TESTS_FAILED)
    assert "passed" not in wrong.stdout
    assert "test_it.py::test_size: not a size: '8 potatoes'" in wrong.stdout
    assert (
        "test_it.py::test_others: other processes cannot use 9.00 GiB of a device of 8.00 GiB"
        in wrong.stdout
    )
    assert (
        "test_it.py::test_option: gpu_memory: got an unexpected keyword argument 'colour'"
        in wrong.stdout
    )
    assert (
        "test_it.py::test_nothing: gpu_memory: missing 1 required positional argument: 'size'"
        in wrong.stdout
    )
    assert "Traceback" not in wrong.stdout + wrong.stderr


def test_workers_of_xdist_have_devices_and_send_the_section(tmp_path):
    spread = run(
        tmp_path, *PLUGIN, "-p", "xdist.plugin", "-n", "1", "-k", "too_much or fits or card"
    )
    assert "1 failed, 3 passed" in spread.stdout
    assert "peak 4.00 KiB of 8.00 MiB on a simulated device" in spread.stdout


ENDS = """
import unittest
import pytest, torch

def work(count):
    return torch.zeros(count)  # work's line

@pytest.mark.gpu_memory("1MiB")
def test_plain():
    work(10**6)

@pytest.mark.gpu_memory("1MiB")
def test_module():
    torch.nn.Sequential(torch.nn.Linear(64, 4096))(torch.ones(64, 64))  # module's line

@pytest.mark.gpu_memory("1MiB")
class TestOld(unittest.TestCase):
    def test_old(self):
        work(10**6)
"""


def test_traceback_of_a_full_device_ends_at_the_users_line(tmp_path):
    failed = run(tmp_path, *PLUGIN, tests=ENDS)
    assert "3 failed" in failed.stdout
    assert "site-packages" not in failed.stdout
    lines = ENDS.split("\n")
    places = [
        1 + next(i for i, line in enumerate(lines) if mark in line)
        for mark in ("# work's", "# module's")
    ]
    assert [failed.stdout.count(f"test_it.py:{place}:") for place in places] == [2, 1]


ADDED = """
import pytest
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.gpu_memory("16 XB" if "wrong" in item.name else "16MiB"))
"""
TO_ADD = """
import pytest
def test_right(gpu_memory): assert gpu_memory.capacity_bytes == 16 << 20
def test_wrong(): pass
@pytest.fixture(autouse=True)
def again(request):
    if "later" in request.node.name:
        request.node.add_marker(pytest.mark.gpu_memory("16"), append=False)
def test_later(): pass
"""


def test_conftest_marker_without_a_device_fails_in_one_line(
    tmp_path,
):
    (tmp_path / "conftest.py").write_text(ADDED)
    ran = run(tmp_path, *PLUGIN, tests=TO_ADD)
    assert (
        "1 passed, 1 failed, 1 error" in ran.stdout or "1 failed, 1 passed, 1 error" in ran.stdout
    )
    assert "\nnot a size: '16 XB'; write it as" in ran.stdout
    assert "\nnot a size: '16' has no unit; write" in ran.stdout
    assert "pytest_plugin.py" not in ran.stdout


def test_empty_indirect_parameter_fails_its_test_in_one_line(ran):
    assert "ERROR test_it.py::test_no_size" in ran.stdout
    assert "\nnot a size: '8 potatoes'; write it as" in ran.stdout


OFF = """
import pytest
@pytest.mark.gpu_memory("8GiB")
def test_marked(gpu_memory): pass
def test_unmarked(): pass
"""


def test_switched_off_marked_tests_are_left_out_with_the_reason(tmp_path):
    off = run(tmp_path, *PLUGIN, "-rs", tests=OFF, OOMGUARD_DISABLE="1")
    assert "1 passed, 1 skipped" in off.stdout
    assert "OOMGUARD_DISABLE is set, so there is no simulated device" in off.stdout


PLAIN = """
import sys
def test_nothing_of_ours_was_loaded():
    assert "torch" not in sys.modules and "oomguard.testing.simulated_device" not in sys.modules
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> str:
    """A PYTHONPATH on which the entry point of pyproject.toml is installed."""
    site = tmp_path_factory.mktemp("site")
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "pytest11"
    ]
    info = site / "oomguard_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: oomguard-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[pytest11]\n" + "".join(f"{name} = {place}\n" for name, place in names.items())
    )
    return os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])


def test_tests_without_devices_load_neither_torch_nor_device(tmp_path, installed):
    plain = run(tmp_path, "--markers", PYTHONPATH=installed, PYTEST_DISABLE_PLUGIN_AUTOLOAD="")
    assert "@pytest.mark.gpu_memory(size, *, caching_allocator=False" in plain.stdout
    plain = run(tmp_path, tests=PLAIN, PYTHONPATH=installed, PYTEST_DISABLE_PLUGIN_AUTOLOAD="")
    assert "1 passed" in plain.stdout
