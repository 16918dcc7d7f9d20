"""The table of metrics: named as Prometheus has it, each with a figure."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from oomguard.telemetry.metrics import Exporter, Tally, metrics, registry_of
from oomguard.telemetry.run_metrics import read_sample


def test_a_name_ends_with_its_unit_and_a_counter_s_in_total():
    for metric in metrics():
        unit = metric.name.removesuffix("_total").rpartition("_")[2]
        units = {
            "bytes",
            "seconds",
            "ratio",
            "info",
            "attempts",
            "incidents",
            "relaunches",
            "patches",
            "requests",
            "steps",
        }
        assert unit in units, metric.name
        assert metric.name.endswith("_total") == (metric.type == "counter"), metric.name


def test_a_figure_is_counted_or_sampled():
    for metric in metrics():
        assert metric.figure in {**vars(Tally()), **read_sample(None)}, metric.name
        assert (metric.figure in read_sample(None)) == (metric.at == ("scrape",)), metric.name


def test_promtool_finds_nothing_to_say_of_the_names():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: it comes with Prometheus (Debian: prometheus)")
    from prometheus_client import generate_latest

    tally = Tally()
    tally.incidents["cuda_oom", "batch_too_large"] = 1
    tally.patches["batch_size", "output-preserving"] = 2
    tally.prediction_errors[("peak_bytes",)] = -0.1
    tally.began_at = 1.0
    places = {"run", "scrape", "process"}
    now = {
        "resident_bytes": 1,
        "host_full_in_s": 1.0,
        "device_total_bytes": {("0", "A"): 2},
        "device_used_bytes": {("0", "A"): 1},
    }
    text = generate_latest(registry_of(Exporter(tally, places, lambda: now)))
    assert text.decode().count("# TYPE") == len(metrics())
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
