"""A real Prometheus scrapes a run, and has a value of every metric."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from oomguard.telemetry.metrics import metrics
from support.counted import BROKEN
from support.supervising import wait_for

# What this machine has no value for: no device, and the attempt that was predicted for still runs.
WITHOUT_VALUE = re.compile("device_memory|prediction_error|host_memory_full")


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=60)


def ask(server: str, expression: str) -> list[dict[str, Any]]:
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{server}/api/v1/query?{query}", timeout=10) as answer:
            result: list[dict[str, Any]] = json.loads(answer.read())["data"]["result"]
    except (urllib.error.URLError, ConnectionError):  # it is not up yet
        return []
    return result


def test_prometheus_scrape_has_a_value_of_every_metric(tmp_path):
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("no Prometheus (Debian: prometheus)")
    run = (
        sys.executable,
        "-m",
        "oomguard",
        "run",
        "--metrics",
        "0",
        "--",
        *BROKEN,
        "--mode",
        "wait",
    )
    with started(*run) as process:
        assert process.stdout is not None
        told = next(
            found for line in process.stdout if (found := re.search(r"http://(\S+)/metrics", line))
        )
        assert any(line.startswith("READY") for line in process.stdout)
        scrape = {
            "job_name": "gpu",
            "scrape_interval": "200ms",
            "static_configs": [{"targets": [told[1]]}],
        }
        config = tmp_path / "prometheus.yml"
        config.write_text(json.dumps({"scrape_configs": [scrape]}))  # JSON is YAML
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        options = (
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address={address}",
        )
        with started(prometheus, *options, "--log.level=error"):
            server = f"http://{address}"
            assert wait_for(lambda: bool(ask(server, "oomguard_attempts_total == 2")), limit_s=60)

            names = [metric.name for metric in metrics() if {"run", "scrape"} & set(metric.at)]
            missing = [
                name for name in names if not WITHOUT_VALUE.search(name) and not ask(server, name)
            ]
            assert missing == []
            (incident,) = ask(server, "sum by (kind, cause) (oomguard_incidents_total)")
            assert incident["metric"]["kind"] == "kv_cache_too_small_for_max_len"
            assert ask(server, 'up{job="gpu"}')[0]["value"][1] == "1"
