"""What is read at a scrape: the command's memory, and the devices' through the real binding over a library that the tests build."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from oomguard.telemetry.run_metrics import read_sample, resident_bytes
from support.counted import scraped

GIB = 2**30
ASK = """
from oomguard.telemetry.metrics import Exporter, registry_of
from oomguard.telemetry.run_metrics import read_sample
from oomguard.telemetry.metrics import Tally
from prometheus_client import generate_latest
print(generate_latest(registry_of(Exporter(Tally(), {"scrape"}, lambda: read_sample(None)))).decode())
"""


def _nvml() -> ModuleType:
    path = Path(__file__).parents[1] / "probe" / "test_nvml.py"
    spec = importlib.util.spec_from_file_location("built_nvml", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = _nvml().build(tmp_path_factory.mktemp("nvml"))
    return path


def scrape(library: Path, mode: str = "") -> dict[tuple[str, ...], float]:
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": mode}
    ran = subprocess.run(
        [sys.executable, "-c", ASK], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return scraped(ran.stdout)


def test_each_device_has_its_total_and_what_is_used(library):
    assert scrape(library) == {
        ("oomguard_device_memory_total_bytes", "0", "Fake GPU A"): 24 * GIB,
        ("oomguard_device_memory_used_bytes", "0", "Fake GPU A"): 14 * GIB,
        ("oomguard_device_memory_total_bytes", "1", "Fake GPU B"): 25 * GIB,
        ("oomguard_device_memory_used_bytes", "1", "Fake GPU B"): 14 * GIB,
    }


def test_devices_that_nobody_tells_of_are_not_exported(library):
    for mode in ["no driver", "no permission", "none"]:
        assert scrape(library, mode) == {}, mode


def test_a_device_whose_size_is_hidden_is_left_out_and_not_zero(library):
    assert {device for _, device, _ in scrape(library, "no sizes")} == {"0"}


def test_memory_of_the_command_is_that_of_all_that_it_started():
    holding = (
        "import sys, time; x = bytearray(50 << 20); print('ready', flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holding!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = read_sample(process.pid)["resident_bytes"]
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.wait(30)
    assert isinstance(found, int)
    assert found > 50 << 20


def test_a_command_that_is_gone_holds_nothing_that_is_known():
    with subprocess.Popen(["true"]) as process:
        process.wait(30)
    assert resident_bytes(process.pid) is None
