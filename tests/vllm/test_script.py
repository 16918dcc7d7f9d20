"""Case 2: a script that calls vllm.LLM, unchanged; the value reaches its engine arguments inside the child."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from oomguard.journal.store import Journal

GIB = 2**30
SMALL = json.dumps({"max_model_len": 1024, "kv_cache_memory_bytes": 1000000})


def run(
    script: str, folder: Path, env: dict[str, str], journal: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    command = [
        "oomguard",
        "run",
        "--journal",
        str(journal),
        *options,
        "--",
        "python",
        *script.split(),
    ]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False
    )


def node_memory() -> tuple[int, int]:
    """Total and available bytes of NUMA node 0, as vLLM's CPU backend reads them."""
    text = Path("/sys/devices/system/node/node0/meminfo").read_text()
    values = {
        name: int(kib) * 1024 for name, kib in re.findall(r"Node 0 ([\w()]+):\s+(\d+) kB", text)
    }
    return values["MemTotal"], sum(
        values.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)")
    )


def run_while_the_node_stands_still(
    script: str,
    folder: Path,
    env: dict[str, str],
    tmp_path: Path,
    beside: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> tuple[subprocess.CompletedProcess[str], Path, int]:
    """Run, and again where it went otherwise than it should while the node's memory moved under it.

    On this kind of machine a node's total and what is free of it change by themselves from minute to minute; a run
    that fails while nothing moved is a failure. Also returned: how far the total moved, in bytes.
    """
    for number in range(5):
        with beside():
            total, available = node_memory()
            journal = tmp_path / f"j{number}.sqlite3"
            ran = run(script, folder, env, journal)
            total_after, available_after = node_memory()
        moved = max(abs(total_after - total), abs(available_after - available)) > 0.01 * total
        if (ran.returncode == 0 and len(Journal(journal).records()) == 2) or not moved:
            break
    return ran, journal, abs(total_after - total)


def test_utilization_that_leaves_nothing_is_raised(folder, vllm_env, tmp_path):
    ran, journal, moved = run_while_the_node_stands_still(
        "low_utilization.py", folder, vllm_env, tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    assert "RESULT [8, 8]" in ran.stdout
    first, second = Journal(journal).records()
    incident = first.incident
    assert incident["kind"] == "cpu_node_memory"
    assert incident["causes"][0]["id"] == "utilization_too_low"
    assert incident["facts"]["kv_cache_available_bytes"] < 0
    value = second.settings["gpu_memory_utilization"]
    facts = incident["facts"]
    consumed = facts["desired_bytes"] - facts["kv_cache_available_bytes"]
    assert (
        consumed / facts["device_total_bytes"] < value < 0.3
    )  # solved from the printed numbers, not a default
    # What was predicted came true: the engine's own line says how much became KV cache.
    assert second.measured["kv_cache_available_bytes"] > 0
    assert second.predicted["kv_cache_available_bytes"] == pytest.approx(
        second.measured["kv_cache_available_bytes"], abs=0.25 * GIB + value * moved
    )


@contextlib.contextmanager
def ballast() -> Iterator[None]:
    """Another process that holds memory of node 0 until the default utilization (0.92) cannot fit, with room to spare."""
    total, available = node_memory()
    size = max(64 * 2**20, int(available - 0.70 * total))
    code = "import sys, time\nb = bytearray(int(sys.argv[1]))\nb[::4096] = b'x' * len(b[::4096])\nprint('held', flush=True)\ntime.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(size)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            process.kill()


def test_default_without_room_is_lowered_to_free_memory(folder, vllm_env, tmp_path):
    ran, journal, _ = run_while_the_node_stands_still(
        "default_utilization.py", folder, vllm_env, tmp_path, ballast
    )
    assert ran.returncode == 0, ran.stderr
    assert "RESULT [8, 8]" in ran.stdout
    first, second = Journal(journal).records()
    assert first.incident["kind"] == "cpu_node_memory"
    facts = first.incident["facts"]
    assert facts["gpu_memory_utilization_ratio"] == 0.92
    value = second.settings["gpu_memory_utilization"]
    assert (
        0.9 * facts["device_free_bytes"] / facts["device_total_bytes"]
        <= value
        < facts["device_free_bytes"] / facts["device_total_bytes"]
    )
    assert "Ran with reduced settings: gpu_memory_utilization 0.92" in ran.stderr


@pytest.fixture(scope="module")
def healthy_log(folder, vllm_env, tmp_path_factory) -> Path:
    """The saved log of a start that works, with the plugin installed and our variable not set."""
    log = tmp_path_factory.mktemp("healthy") / "run.log"
    with log.open("wb") as file:
        subprocess.run(
            ["python", "feasible.py", SMALL],
            cwd=folder,
            env=vllm_env,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=True,
        )
    return log


def test_a_healthy_start_has_no_incident(healthy_log, vllm_env):
    assert b'"starts": true' in healthy_log.read_bytes()
    ran = subprocess.run(
        ["oomguard", "diagnose", "--format", "json", str(healthy_log)],
        env=vllm_env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(ran.stdout)["incidents"] == []


def test_installed_plugin_does_nothing_without_our_variable(healthy_log, folder, vllm_env):
    changed_env = {**vllm_env, "OOMGUARD_VLLM_OVERRIDES": '{"max_model_len": 512}'}
    changed = subprocess.run(
        ["python", "feasible.py", SMALL],
        cwd=folder,
        env=changed_env,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert '"max_model_len": 1024' in healthy_log.read_text()
    assert '"max_model_len": 512' in changed.stdout
