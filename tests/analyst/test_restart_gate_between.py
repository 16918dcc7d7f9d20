"""Between the attempts of oomguard run, with a server that fails in vLLM's words, real processes and real sockets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oomguard import retry
from oomguard.analyst import restart_gate
from oomguard.analyst.restart_gate import RestartGate
from oomguard.core import log
from oomguard.core.facts import Fact
from oomguard.core.incident import Cause, Effect, Incident, Patch
from oomguard.engines.command import Launch
from oomguard.engines.vllm import launch as vllm
from oomguard.remedy.policy import Policy
from oomguard.retry import Ledger
from support.supervising import LIMIT_S, wait_for

ENGINE = Path(__file__).with_name("fake_vllm.py")
# The same program, that gives a port less time: what is waited for is there or is not.
HURRIED = [
    sys.executable,
    "-c",
    "from oomguard.analyst import restart_gate; restart_gate.LIMIT_S = 0.3\nfrom oomguard.__main__ import main; main()",
    "run",
]
OPTIONS = ("--allow", "reduces-capacity", "--log-format", "json")


@pytest.fixture
def engine(tmp_path: Path) -> list[str]:
    """``vllm serve`` on a port of its own, which counts its starts."""
    (tmp_path / "vllm").symlink_to(ENGINE)
    count = str(tmp_path / "count")
    command = [sys.executable, str(tmp_path / "vllm"), "serve", "org/model", "--count", count]
    return [*command, "--host", "127.0.0.1", "--port", str(free_port())]


@pytest.fixture
def unix_path() -> Path:
    """A path short enough for a Unix socket."""
    path = Path("/tmp") / f"oomguard-test-{os.getpid()}-{time.monotonic_ns()}.sock"
    yield path
    path.unlink(missing_ok=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(*words: str, options: tuple[str, ...] = OPTIONS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HURRIED, *options, "--", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def events(errors: str) -> list[dict]:
    return [json.loads(line) for line in errors.splitlines() if line.startswith("{")]


def event(errors: str, begins: str) -> dict:
    (found,) = [told for told in events(errors) if told["event"].startswith(begins)]
    return found


def starts(tmp_path: Path) -> list[str]:
    return (tmp_path / "count").read_text().split()


def test_useless_change_is_a_crash_loop_and_not_repeated(tmp_path, engine):
    ran = run(*engine, options=(*OPTIONS, "--max-attempts", "10", "--max-per-hour", "9"))
    assert ran.returncode == 1
    assert starts(tmp_path) == ["0.9", "0.647", "0.394"]
    assert (
        event(ran.stderr, "Waiting before the next attempt")["quick_failures"] == 2
    )  # none before the first relaunch
    said = event(ran.stderr, "Crash loop")
    assert said["what"].startswith("3 starts in ")
    assert said["what"].endswith(", each failed with sampler_warmup_oom (OG321, sampling_logits)")
    assert said["ran_for"].count(" s") == 3
    refused = event(
        ran.stderr, "Not retried: the only change left is another step of one that did not help"
    )
    assert refused["next_step"] == "gpu_memory_utilization 0.394 -> 0.141"
    assert refused["command"].endswith("--gpu-memory-utilization 0.141")


def held_while_it_fails(
    tmp_path: Path, engine: list[str], held: socket.socket, address: object
) -> tuple[int, str]:
    """Run the engine, and listen on its address before it fails."""
    go = tmp_path / "go"
    command = [*HURRIED, *OPTIONS, "--", *engine, "--before", str(go), "--fits", "0.8"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert wait_for((tmp_path / "count").exists)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
        held.listen()
        go.touch()
        _, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, errors


def test_port_of_another_process_ends_the_run_with_its_name(tmp_path, engine):
    port = int(engine[-1])
    with socket.socket() as held:
        status, errors = held_while_it_fails(tmp_path, engine, held, ("127.0.0.1", port))
    assert status == 1
    assert starts(tmp_path) == ["0.9"]
    said = event(errors, "Not retried: its address is in use")
    assert said["address"] == f"127.0.0.1:{port}"
    assert said["held_by"].startswith(f"pid {os.getpid()} (")
    assert said["command"].endswith("--gpu-memory-utilization 0.647")


def test_the_first_start_is_left_alone_where_its_port_is_taken(tmp_path, engine):
    with socket.socket() as held:
        held.bind(("127.0.0.1", int(engine[-1])))
        held.listen()
        ran = run(*engine)
    assert ran.returncode == 1
    assert "Address already in use" in ran.stderr
    assert not (tmp_path / "count").exists()
    assert "its address is in use" not in ran.stderr


def test_socket_of_a_failed_attempt_is_removed_for_the_next(tmp_path, engine, unix_path):
    ran = run(*engine, "--uds", str(unix_path), "--fits", "0.8")
    assert ran.returncode == 0, ran.stderr
    assert starts(tmp_path) == ["0.9", "0.647"]
    assert event(ran.stderr, "Removed the socket of the failed attempt")["path"] == str(unix_path)


# Without a process: the rows of a ledger, and what is told.


def failed(setting: str = "gpu_memory_utilization", new: float = 0.8) -> Incident:
    facts = {"tried_bytes": Fact("tried_bytes", 2**32, "printed")}
    plan = (Patch(setting, 0.9, new, Effect.OUTPUT_PRESERVING, "it fits"),)
    cause = Cause("utilization_too_high", "OG316", 0.8, (), "why")
    return Incident(
        "cuda_oom", "out of memory", phase="decode", facts=facts, causes=(cause,), plan=plan
    )


@pytest.fixture
def said(monkeypatch):
    """Every event that is written."""
    told = []
    monkeypatch.setattr(
        log, "_writer", [lambda _level, text, fields: told.append({"event": text, **fields})]
    )
    monkeypatch.setattr(retry, "devices_by_index", dict)
    return told


def failing(ledger: Ledger, folder: Path, *flags: str, times: int = 2) -> list[bool]:
    """Fail so often, each time after a thousandth of a second; return whether each failure led on."""
    launch = Launch(("vllm", "serve", "org/model", *(flags or ("--port", str(free_port())))))
    manners, led_on = (
        RestartGate(ledger, vllm, lambda: False, lambda: "the next command"),
        [],
    )
    for number in ledger.rounds():
        manners.begins(launch)
        incident = failed(new=0.9 - number / 10)
        attempt = ledger.end(incident, error="exit status 1", exit_status=1, seconds=0.001)
        if number > times:
            break
        ledger.choose(incident, vllm.carries)
        led_on.append(manners.permits_next(launch, attempt, folder))
        if not led_on[-1]:
            ledger.stop()
    return led_on


def test_a_pause_that_would_reach_the_deadline_is_not_begun(said, tmp_path, monkeypatch):
    ledger = Ledger(Policy(deadline_s=1000))
    monkeypatch.setattr(restart_gate, "backoff_s", lambda quick: 0.0 if quick < 2 else 1000.0)
    began_s = time.monotonic()
    assert failing(ledger, tmp_path) == [True, False]
    assert time.monotonic() - began_s < 60
    assert said[-1] == {
        "event": "Not retried: the deadline is before the end of the pause",
        "pause_s": 1000.0,
        "command": "the next command",
    }


def test_memory_that_is_still_held_is_told_and_the_run_goes_on(said, tmp_path, monkeypatch):
    held = "GPU 0: 6.00 GiB still held, by pid 41 (vllm)"
    monkeypatch.setattr(retry, "wait_until_free", lambda *_args, **_options: held)
    assert failing(Ledger(Policy()), tmp_path, times=1) == [True]
    assert said == [{"event": "Memory is still in use after the failed attempt", "held": held}]


def test_socket_from_before_the_attempt_is_not_removed(said, tmp_path, unix_path, monkeypatch):
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(unix_path))
    monkeypatch.setattr(restart_gate, "LIMIT_S", 0.0)
    assert failing(Ledger(Policy()), tmp_path, "--uds", str(unix_path), times=1) == [False]
    assert unix_path.exists()
    assert said[-1]["held_by"] == "no process, but the file of an old socket is still there"


def test_relaunches_within_an_hour_use_the_given_clock(said, tmp_path, monkeypatch):
    """A server that serves for a while between its failures is run again as often as its hours allow."""
    now = {"s": 0.0}
    monkeypatch.setattr(restart_gate, "backoff_s", lambda _quick: 0.0)
    limit = restart_gate.RateLimit
    monkeypatch.setattr(restart_gate, "RateLimit", lambda most: limit(most, lambda: now["s"]))
    monkeypatch.setattr(retry, "devices_by_index", lambda: now.update(s=now["s"] + 1300) or {})
    ledger = Ledger(Policy(max_attempts=9, max_per_hour=3))
    monkeypatch.setattr(restart_gate.CrashLoop, "is_another_step", lambda *_args: False)
    assert failing(ledger, tmp_path, times=8) == [True] * 8
    monkeypatch.setattr(retry, "devices_by_index", lambda: now.update(s=now["s"] + 1100) or {})
    assert failing(Ledger(ledger.policy), tmp_path, times=8) == [True, True, True, False]
