"""``run --metrics``: scraped while the command runs, and where it cannot be served the command runs all the same."""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oomguard.core.installation import install_hint
from support.counted import BROKEN, run, scraped
from support.each import each
from support.supervising import hooked, wait_for

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "metrics.md"
WAITS = (*BROKEN, "--mode", "wait")
# An installation without the extras: what they bring cannot be imported.
WITHOUT = """
import sys
for name in ("prometheus_client", "opentelemetry"):
    sys.modules[name] = None
"""


@contextmanager
def running(
    *options: str, command: tuple[str, ...] = WAITS
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A run whose command prints READY and waits, and the address that it told."""
    words = [sys.executable, "-m", "oomguard", "run", *options, "--", *command]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        url = ""
        for line in process.stdout:
            found = re.search(r"http://\S+", line)
            url = found[0] if found else url
            if line.startswith("READY"):
                break
        try:
            yield process, url
        finally:
            process.terminate()
            process.wait(timeout=60)


def get(url: str) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return scraped(answer.read().decode())


def test_scrape_shows_events_while_the_command_runs():
    with running("--metrics", "0") as (_, url):
        found = get(url)

    assert found[("oomguard_attempts_total",)] == 2
    assert (
        found[
            "oomguard_incidents_total", "max_model_len_too_large", "kv_cache_too_small_for_max_len"
        ]
        == 1
    )
    assert found["oomguard_patches_total", "reduces-capacity", "max_model_len"] == 1
    assert found[("oomguard_command_resident_memory_bytes",)] > 1 << 20
    assert found[("oomguard_attempt_start_time_seconds",)] > 1.7e9


def test_broken_scrape_prints_nothing_into_the_output():
    with running("--metrics", "0") as (process, url):
        host, _, port = url.removeprefix("http://").removesuffix("/metrics").partition(":")
        for sent in (b"", b"nonsense\r\n\r\n", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=30) as broken:
                broken.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )  # closing resets
                broken.sendall(sent)
        assert wait_for(lambda: get(url)[("oomguard_attempts_total",)] == 2)
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert "Traceback" not in output
    assert "Exception" not in output


def test_port_listens_locally_unless_an_address_is_given():
    with running("--metrics", "0") as (_, url):
        assert url.startswith("http://127.0.0.1:")
    with running("--metrics", "[::1]:0") as (_, url):
        assert url.startswith("http://[::1]:")
        assert get(url)[("oomguard_attempts_total",)] == 2


def test_taken_port_names_the_command_that_finds_its_holder():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = run("--metrics", str(port), command=("echo", "ran"))

    assert (ran.returncode, ran.stdout) == (0, "ran\n")
    documented = next(
        line for line in DOCS.read_text().splitlines() if "No metrics are served" in line
    )
    assert documented.replace("9400", str(port)) in ran.stderr.splitlines()


def test_address_of_another_machine_is_reported_only():
    host = "192.0.2.1"
    ran = run("--metrics", f"{host}:9400", command=("echo", "ran"))
    assert (ran.returncode, ran.stdout) == (0, "ran\n")
    assert "No metrics are served; the run continues without them" in ran.stderr


SERVERS = {
    "bare": ("vllm", "serve", "./tiny", "--port", "19481"),
    "shell": ("bash", "-c", "export A=1; exec vllm serve ./tiny --port 19481"),
    "shell, second of two": ("sh", "-c", "true && vllm serve ./tiny --port 19481"),
    "module": (
        "timeout",
        "60",
        "python3",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--port",
        "19481",
    ),
    "run": (
        "env",
        "A=1",
        "oomguard",
        "run",
        "--metrics",
        "1",
        "--",
        "nice",
        "vllm",
        "serve",
        "./tiny",
        "--port",
        "19481",
    ),
}


@each("how", SERVERS)
def test_commands_own_port_is_refused_before_the_start(how):
    ran = run("--metrics", "19481", command=SERVERS[how])
    assert ran.returncode == 2
    assert "the command itself listens on port 19481" in ran.stderr


def test_missing_metrics_target_is_one_message_and_no_start(tmp_path):
    ran = run("--metrics", "everywhere", command=("touch", str(tmp_path / "started")))
    assert ran.returncode == 2
    assert "is not a port, an address, or a file" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "started").exists()


def test_missing_library_names_the_extra_and_starts_nothing(tmp_path):
    words = [
        sys.executable,
        "-m",
        "oomguard",
        "run",
        "--metrics",
        "0",
        "--",
        "touch",
        str(tmp_path / "started"),
    ]
    env = hooked(tmp_path, WITHOUT)
    ran = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert install_hint("metrics") in ran.stderr
    assert not (tmp_path / "started").exists()


def test_named_exporter_without_the_sdk_names_the_package(tmp_path):
    env = {**hooked(tmp_path, WITHOUT), "OTEL_TRACES_EXPORTER": "otlp,zipkin"}
    words = [sys.executable, "-m", "oomguard", "run", "--", "echo", "ran"]
    ran = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, "ran\n")
    assert "No spans are sent: OpenTelemetry's SDK is not installed" in ran.stderr
    assert f"{install_hint('otel')} and pip install opentelemetry-exporter-zipkin" in ran.stderr


def test_outer_of_two_nested_runs_obeys_the_variable(tmp_path):
    inner = (sys.executable, "-m", "oomguard", "run", "--", "sh", "-c", "exit 3")
    ran = run(command=inner, OOMGUARD_METRICS=str(tmp_path / "run.prom"))
    assert ran.returncode == 3
    assert scraped((tmp_path / "run.prom").read_text())[("oomguard_attempts_total",)] == 1


def test_a_user_who_stops_a_healthy_run_is_no_failure(tmp_path):
    file = tmp_path / "run.prom"
    with running(
        "--metrics", str(file), command=(*BROKEN, "--max-model-len", "64", "--mode", "wait")
    ):
        pass
    found = scraped(file.read_text())
    assert found[("oomguard_attempts_total",)] == 1
    assert found[("oomguard_failed_attempts_total",)] == 0


def test_a_multiprocess_folder_of_the_command_is_left_alone(tmp_path):
    """vLLM's servers read every file in it as their own."""
    folder = tmp_path / "multi"
    folder.mkdir()
    ran = run("--metrics", str(tmp_path / "run.prom"), PROMETHEUS_MULTIPROC_DIR=str(folder))
    assert ran.returncode == 0
    assert list(folder.iterdir()) == []


def test_broken_library_is_reported_once_and_the_command_runs(tmp_path):
    target = "0"
    (tmp_path / "prometheus_client").mkdir()
    (tmp_path / "prometheus_client" / "__init__.py").write_text("raise RuntimeError('broken')")
    words = [
        sys.executable,
        "-m",
        "oomguard",
        "run",
        "--metrics",
        target,
        "--",
        "sh",
        "-c",
        "echo ran; sleep 1",
    ]
    path = os.pathsep.join(
        filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", str(Path(__file__).parents[2]))))
    )
    ran = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (ran.returncode, ran.stdout) == (0, "ran\n")
    assert ran.stderr.count("RuntimeError: broken") == 1
    assert "Traceback" not in ran.stderr
