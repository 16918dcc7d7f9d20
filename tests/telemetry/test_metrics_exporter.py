"""What a registry collects: each place its own metrics, and what is unknown is absent, not zero."""

from __future__ import annotations

from prometheus_client import generate_latest

from oomguard.telemetry.metrics import Exporter, Tally, metrics, registry_of
from support.counted import scraped


def exported(exporter: Exporter) -> dict[tuple[str, ...], float]:
    return scraped(generate_latest(registry_of(exporter)).decode())


def test_a_place_exports_the_metrics_of_its_rows_and_no_other():
    for place in ["run", "scrape", "process"]:
        described = {family.name for family in Exporter(Tally(), {place}).describe()}
        assert described == {
            metric.name.removesuffix("_total") for metric in metrics() if place in metric.at
        }, place


def test_unreported_figure_is_absent_and_a_zero_is_not():
    now = {
        "host_full_in_s": None,
        "resident_bytes": None,
        "device_total_bytes": {},
        "device_used_bytes": {("0", ""): 0},
    }
    found = exported(Exporter(Tally(), {"run", "scrape"}, lambda: now))

    assert found[("oomguard_failed_attempts_total",)] == 0
    assert found["oomguard_device_memory_used_bytes", "0", ""] == 0
    absent = ("resident", "memory_total", "start_time", "prediction", "incidents", "patches")
    assert [name for name, *_ in found if any(part in name for part in absent)] == []


def test_each_collection_reads_what_is_so_then():
    tally = Tally()
    registry = registry_of(Exporter(tally, {"run"}))
    values = []
    for _ in range(2):
        values.append(scraped(generate_latest(registry).decode())[("oomguard_attempts_total",)])
        tally.began((), is_relaunch=False)
    assert values == [0, 1]


def test_a_label_may_hold_any_text():
    tally = Tally()
    tally.patches['a"b\\c\nd', "output-preserving"] = 1
    assert (
        exported(Exporter(tally, {"run"}))[
            "oomguard_patches_total", "output-preserving", 'a"b\\c\nd'
        ]
        == 1
    )
