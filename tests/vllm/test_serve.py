"""Case 1: vllm serve with a byte count and a length that do not go together."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from oomguard.journal.store import Journal


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(port: int, *options: str) -> list[str]:
    serve = [
        "vllm",
        "serve",
        "./tiny",
        "--max-model-len",
        "32768",
        "--kv-cache-memory-bytes",
        "1000000",
        "--enforce-eager",
        "--port",
        str(port),
    ]
    return ["oomguard", "run", *options, "--", *serve]


@pytest.fixture(scope="module")
def refused(
    folder: Path, vllm_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> subprocess.CompletedProcess[str]:
    """The run with the default policy: nothing may be changed by itself."""
    journal = tmp_path_factory.mktemp("state") / "journal.sqlite3"
    ran = subprocess.run(
        command(free_port(), "--journal", str(journal)),
        cwd=folder,
        env=vllm_env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert len(Journal(journal).records()) == 1
    return ran


def test_run_ends_with_the_childs_status_by_default(refused):
    assert refused.returncode == 1
    assert refused.stderr.count("oomguard: Attempt ended") == 1


def test_the_childs_cause_is_shown_once(refused):
    assert sum(line.startswith("oomguard[") for line in refused.stderr.splitlines()) == 1
    assert "engine_dead" not in refused.stderr
    assert refused.stderr.count("Why:") == 1


def test_each_command_that_would_work_is_given(refused):
    text = " ".join(line.strip("│ ") for line in refused.stderr.splitlines())
    assert "vllm serve ./tiny --max-model-len 1792 --kv-cache-memory-bytes 1000000" in text
    assert "--kv-cache-memory-bytes 16842752" in text
    assert "you set it; --allow reduces-capacity permits it" in text


def test_given_values_start_the_real_engine_failing_ones_do_not(folder, vllm_env, refused):
    settings = [
        {"max_model_len": 1792, "kv_cache_memory_bytes": 1000000},
        {"max_model_len": 32768, "kv_cache_memory_bytes": 16842752},
        {"max_model_len": 1920, "kv_cache_memory_bytes": 1000000},
        {"max_model_len": 32768, "kv_cache_memory_bytes": 16842751},
    ]
    ran = subprocess.run(
        ["python", "feasible.py", *map(json.dumps, settings)],
        cwd=folder,
        env=vllm_env,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    answers = [
        json.loads(line.split(" ", 1)[1])
        for line in ran.stdout.splitlines()
        if line.startswith("STARTS")
    ]
    assert [answer["starts"] for answer in answers] == [True, True, False, False]


def test_permitted_length_is_solved_and_the_server_answers(folder, vllm_env, tmp_path):
    port = free_port()
    journal = tmp_path / "journal.sqlite3"
    output, errors = tmp_path / "out", tmp_path / "err"
    options = ("--allow", "reduces-capacity", "--journal", str(journal))
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            command(port, *options), cwd=folder, env=vllm_env, stdout=out, stderr=err
        )
    try:
        answer = completion(port, process)
        assert answer["usage"]["completion_tokens"] == 5
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=90)
    text = errors.read_text()
    assert process.returncode in {0, 143}, text
    assert text.count("oomguard: Attempt ended") == 2
    assert "This run continues with reduced settings: max_model_len=1792" in text
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    first, second = Journal(journal).records()
    assert first.incident["kind"] == "kv_cache_too_small_for_max_len"
    assert second.settings == {"max_model_len": 1792}
    assert (
        second.predicted["kv_cache_capacity_tokens"] <= second.measured["kv_cache_capacity_tokens"]
    )


def completion(port: int, process: subprocess.Popen[bytes]) -> dict:
    body = json.dumps(
        {"model": "./tiny", "prompt": "the quick", "max_tokens": 5, "ignore_eos": True}
    ).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        try:
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except OSError:
            time.sleep(1)
    raise AssertionError("the server never answered")
