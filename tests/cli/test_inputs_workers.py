"""Inputs in parallel: the same bytes whatever the number of processes, and what happens when one of them ends."""

from __future__ import annotations

import contextlib
import gzip
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oomguard.cli.inputs import automatic_jobs, is_portable, usable_cpus
from support.each import each

LIMIT_S = 200  # what a machine under load may take
LOGS = Path(__file__).parents[2] / "examples" / "logs"
OOM = str(LOGS / "vllm_serve_kv_cache.log")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "oomguard", "diagnose", *arguments]


def diagnose(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(*arguments), input=stdin, capture_output=True, timeout=LIMIT_S, check=False
    )


@pytest.fixture(scope="module")
def long_log(tmp_path_factory) -> str:
    """A small file that takes many seconds to read."""
    path = tmp_path_factory.mktemp("long") / "long.log.gz"
    block = gzip.compress(b"INFO step 12 of a long and healthy run\n" * 200_000)
    with path.open("wb") as file:
        for _ in range(400):
            file.write(block)
    return str(path)


def reader_of(path: str, process: psutil.Process) -> psutil.Process:
    """The worker that has the file open."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for child in process.children(recursive=True):
            try:
                if path in {file.path for file in child.open_files()}:
                    return child
            except psutil.Error:
                continue
        time.sleep(0.02)
    raise AssertionError("no worker reads it")


@settings(
    max_examples=3,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_any_number_of_processes_prints_the_same_bytes(tmp_path, data):
    (tmp_path / "fine.log").write_text("INFO fine\n")
    (tmp_path / "cut.log.gz").write_bytes(gzip.compress(Path(OOM).read_bytes())[:-50])
    names = [
        OOM,
        str(tmp_path / "fine.log"),
        str(tmp_path / "cut.log.gz"),
        str(tmp_path / "no.log"),
        "-",
    ]
    paths = data.draw(st.lists(st.sampled_from(names), min_size=2, max_size=6))
    form = data.draw(st.sampled_from(["terminal", "json", "markdown", "html"]))
    jobs = str(data.draw(st.integers(2, 3)))
    alone, together = (
        diagnose("--format", form, "--jobs", n, *paths, stdin=Path(OOM).read_bytes())
        for n in ("1", jobs)
    )

    assert alone.stdout or set(paths) == {names[3]}  # of one that is not there nothing is printed
    assert (together.returncode, together.stdout, together.stderr) == (
        alone.returncode,
        alone.stdout,
        alone.stderr,
    )


def test_a_worker_that_dies_costs_its_own_file_only(tmp_path, long_log):
    process = subprocess.Popen(
        command("--format", "json", "--jobs", "2", OOM, long_log, OOM, OOM),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        reader_of(long_log, psutil.Process(process.pid)).kill()
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 2
    assert [json.loads(line)["source"] for line in out.splitlines()] == [OOM] * 3
    assert err.decode() == f"oomguard: {long_log}: the process that read it was killed by SIGKILL\n"


def test_first_result_is_printed_while_the_second_is_read(long_log):
    process = subprocess.Popen(
        command("--format", "json", "--jobs", "2", OOM, long_log), stdout=subprocess.PIPE
    )
    try:
        assert json.loads(process.stdout.readline())["source"] == OOM
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_ends_all_processes_at_once_without_a_traceback(long_log, jobs):
    process = subprocess.Popen(
        command("--jobs", jobs, long_log, long_log), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        watched = psutil.Process(process.pid)
        if jobs == "1":
            while long_log not in {file.path for file in watched.open_files()}:
                time.sleep(0.02)
        else:
            reader_of(long_log, watched)
        for each in [watched, *watched.children(recursive=True)]:  # as a terminal does
            with contextlib.suppress(
                psutil.NoSuchProcess
            ):  # the first signal may have ended the others
                each.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 130  # a log read to its end gives 0
    assert b"Traceback" not in err


def test_a_reader_that_goes_away_ends_the_workers_too(long_log):
    line = shlex.join(command("--jobs", "2", "--format", "json", *[OOM] * 30, long_log))
    ran = subprocess.run(
        ["bash", "-c", f"{line} | head -c 20"], capture_output=True, timeout=LIMIT_S, check=False
    )
    assert b"Traceback" not in ran.stderr


@each(
    ("sizes", "jobs"),
    [
        ({}, 1),
        ({"a": 10}, 1),
        ({"a": 1 << 40}, 1),
        ({"a": 1, "b": 1}, 1),
        ({"a": 1 << 32, "b": 1}, min(2, usable_cpus())),
        ({f"{i}.gz": 1 << 20 for i in range(100)}, min(37, usable_cpus())),
    ],
)
def test_the_automatic_number_is_what_pays(sizes, jobs):
    assert automatic_jobs(sizes) == jobs


def test_name_of_an_own_descriptor_is_not_given_away(tmp_path):
    assert is_portable(OOM)
    assert not is_portable("/dev/stdin")
    assert not is_portable("/proc/self/fd/0")
    assert not is_portable("-")
    assert not is_portable(str(tmp_path))
