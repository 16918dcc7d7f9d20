"""Device memory through the real nvidia-ml-py binding, over a libnvidia-ml that the test builds itself."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.probe.nvml import nvml_failure

GIB = 2**30
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

SOURCE = r"""
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu, compute; } process_t;
enum { OK = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, NO_PERMISSION = 4, TOO_SMALL = 7, NO_DRIVER = 9, LOST = 15 };
static int sessions = 0, devices[3] = {0, 1, 2};
static int is(const char *want) { const char *v = getenv("FAKE_NVML"); return v && !strcmp(v, want); }
int fake_sessions(void) { return sessions; }
int nvmlInitWithFlags(unsigned int flags) { if (is("no driver")) return NO_DRIVER; sessions++; return OK; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { if (!sessions) return UNINITIALIZED; sessions--; return OK; }
const char *nvmlErrorString(int code) { return "fake"; }
int nvmlDeviceGetCount_v2(unsigned int *n) {
  if (is("no permission")) return NO_PERMISSION;
  *n = is("none") ? 0 : 2; return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **h) {
  if (i == 1 && is("lost")) return LOST;
  *h = &devices[i]; return OK;
}
int nvmlDeviceGetMemoryInfo(int *h, memory_t *m) {
  if (*h == 1 && is("no sizes")) return NOT_SUPPORTED;
  m->total = (24ULL + *h) << 30; m->free = (10ULL + *h) << 30; m->used = 14ULL << 30; return OK;
}
int nvmlDeviceGetName(int *h, char *name, unsigned int size) {
  strncpy(name, is("bad name") ? "\xff\xfe" : *h ? "Fake GPU B" : "Fake GPU A", size); return OK;
}
#ifndef OLD_DRIVER
int nvmlDeviceGetComputeRunningProcesses_v3(int *h, unsigned int *n, process_t *p) {
  if (is("no processes")) return NOT_SUPPORTED;
  if (*h == 1) { *n = 0; return OK; }
  if (*n < 2 || !p) { *n = 2; return TOO_SMALL; }
  p[0].pid = 41; p[0].used = 3ULL << 30; p[1].pid = 42; p[1].used = (unsigned long long)-1; *n = 2; return OK;
}
#endif
"""
ASK = """
import ctypes, dataclasses, json
from oomguard.probe.nvml import devices
found = devices()
try:
    sessions = ctypes.CDLL("libnvidia-ml.so.1").fake_sessions()
except (OSError, AttributeError):
    sessions = None
shown = found and [dataclasses.asdict(device) for device in found]
print(json.dumps({"devices": shown, "none": found is None, "sessions": sessions}))
"""


def build(folder: Path, *options: str) -> Path:
    if COMPILER is None:
        pytest.skip("no C compiler to build the fake libnvidia-ml with")
    source = folder / "nvml.c"
    source.write_text(SOURCE)
    subprocess.run(
        [
            COMPILER,
            "-shared",
            "-fPIC",
            "-w",
            *options,
            "-o",
            str(folder / "libnvidia-ml.so.1"),
            str(source),
        ],
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


def ask(library: Path, mode: str = "") -> dict:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": mode}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def test_two_devices_are_read_with_names_sizes_and_processes(library):
    first, second = ask(library)["devices"]

    assert first == {
        "index": 0,
        "name": "Fake GPU A",
        "total_bytes": 24 * GIB,
        "free_bytes": 10 * GIB,
        "used_bytes_by_pid": {"41": 3 * GIB, "42": None},
    }
    assert second == {
        "index": 1,
        "name": "Fake GPU B",
        "total_bytes": 25 * GIB,
        "free_bytes": 11 * GIB,
        "used_bytes_by_pid": {},
    }


def test_sizes_that_cannot_be_read_are_unknown_and_not_zero(library):
    first, second = ask(library, "no sizes")["devices"]

    assert first["total_bytes"] == 24 * GIB
    assert (second["total_bytes"], second["free_bytes"]) == (None, None)
    assert second["name"] == "Fake GPU B"


def test_unreadable_processes_are_unknown_not_absent(library):
    assert [device["used_bytes_by_pid"] for device in ask(library, "no processes")["devices"]] == [
        None,
        None,
    ]


def test_a_lost_device_keeps_its_place(library):
    first, second = ask(library, "lost")["devices"]

    assert first["total_bytes"] == 24 * GIB
    assert second == {
        "index": 1,
        "name": None,
        "total_bytes": None,
        "free_bytes": None,
        "used_bytes_by_pid": None,
    }


def test_a_name_that_is_no_text_is_unknown(library):
    first, _ = ask(library, "bad name")["devices"]

    assert first["name"] is None
    assert first["total_bytes"] == 24 * GIB


def test_no_device_is_an_empty_answer_and_not_unknown(library):
    answer = ask(library, "none")

    assert (answer["devices"], answer["none"]) == ([], False)


@pytest.mark.parametrize("mode", ["no driver", "no permission"])
def test_what_cannot_be_asked_is_unknown(library, mode):
    assert ask(library, mode)["none"]


@pytest.mark.parametrize("mode", ["", "no sizes", "no permission", "no driver"])
def test_every_session_is_closed(library, mode):
    assert ask(library, mode)["sessions"] == 0


SESSION = """
import ctypes, json
from oomguard.probe import nvml
session = nvml.Session.begin()
again = [session.devices(), session.devices()]
once = nvml.devices()
session.end()
same = [[(d.index, d.total_bytes, d.free_bytes, d.used_bytes_by_pid) for d in found] for found in (*again, once)]
print(json.dumps([same[0] == same[1] == same[2], session.uuids, ctypes.CDLL("libnvidia-ml.so.1").fake_sessions()]))
"""


def test_session_repeats_its_report_and_is_closed(library):
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": ""}
    done = subprocess.run(
        [sys.executable, "-c", SESSION],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == [True, {"0": None, "1": None}, 0]


def test_a_driver_without_the_process_call_still_gives_sizes(tmp_path):
    first, _ = ask(build(tmp_path, "-DOLD_DRIVER"))["devices"]

    assert first["total_bytes"] == 24 * GIB
    assert first["used_bytes_by_pid"] is None


def test_a_library_that_cannot_be_loaded_is_unknown(tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")

    assert ask(tmp_path)["none"]


def test_a_missing_library_is_unknown(tmp_path):
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        assert ask(tmp_path)["none"]
    else:
        pytest.skip("this machine has a real libnvidia-ml")


def test_a_library_that_is_no_library_is_why_nvml_fails(tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    code = "from oomguard.probe.nvml import nvml_failure; print(nvml_failure())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert "NVML" in done.stdout or "libnvidia" in done.stdout


def test_why_nvml_fails_is_one_line_or_nothing():
    why = nvml_failure()

    assert why is None or (why and "\n" not in why)
