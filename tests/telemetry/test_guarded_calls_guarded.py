"""Guarded calls: those that run out of memory are counted and told as spans, all others are left alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import oomguard
from oomguard.core.errors import SettingError
from oomguard.core.incident import Attempt
from oomguard.core.installation import install_hint
from oomguard.telemetry import guarded_calls
from support.counted import scraped

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

REFUSED = "HIP out of memory. Tried to allocate 2.00 GiB."
GUARDED = """
import sys, oomguard
@oomguard.guard(batch="rows")
def work(rows):
    if len(rows) > 4: raise RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB.")
    return rows
assert work(list(range(8))) == list(range(8))
print([name for name in ("opentelemetry", "prometheus_client") if name in sys.modules])
"""


@pytest.fixture
def fits_four() -> Any:
    """A function that has not learned yet how many rows fit."""

    @oomguard.guard(batch="rows")
    def function(rows: list[int]) -> list[int]:
        if len(rows) > 4:
            raise RuntimeError(REFUSED)
        return rows

    return function


@oomguard.guard(batch="rows")
def never_fits(rows: list[int]) -> list[int]:
    raise RuntimeError(REFUSED)


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    before = list(guarded_calls.tallies)
    made = CollectorRegistry()
    oomguard.enable_metrics(made)
    yield made
    guarded_calls.tallies[:] = before


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """A provider can be set once in a process."""
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_tracer_provider(provider)
    return made


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def values(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    found = scraped(generate_latest(registry).decode())
    return {key: value for key, value in found.items() if key[0] not in ("oomguard_build_info",)}


def finished(spans: InMemorySpanExporter, name: str = "oomguard.call") -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


def test_call_that_succeeds_at_once_adds_no_count_and_no_span(registry, spans, fits_four):
    assert fits_four([1, 2]) == [1, 2]

    assert values(registry)[("oomguard_attempts_total",)] == 0
    assert spans.get_finished_spans() == ()


def test_a_remedied_call_is_counted_by_what_was_tried(registry, fits_four):
    assert fits_four(list(range(8))) == list(range(8))

    found = values(registry)
    attempts = fits_four.attempts
    assert found[("oomguard_attempts_total",)] == len(attempts) > 1
    assert found[("oomguard_relaunches_total",)] == len(attempts) - 1
    failed = [attempt for attempt in attempts if not attempt.succeeded]
    assert found[("oomguard_failed_attempts_total",)] == len(failed)
    assert found[("oomguard_failed_attempts_seconds_total",)] == pytest.approx(
        sum(one.seconds for one in failed)
    )
    incidents = {key: value for key, value in found.items() if key[0] == "oomguard_incidents_total"}
    assert {kind for _, _, kind in incidents} == {"hip_oom"}
    assert sum(incidents.values()) == len(failed)
    assert found["oomguard_patches_total", "output-preserving", "batch_size"] == len(attempts) - 1


def test_a_remedied_call_is_one_span_below_the_programs_own(spans, fits_four):
    with trace.get_tracer("program").start_as_current_span("request") as above:
        fits_four(list(range(8)))

    (span,) = finished(spans)
    assert span.parent is not None
    assert span.parent.span_id == above.get_span_context().span_id
    assert span.attributes is not None
    assert span.attributes["oomguard.attempts"] == len(fits_four.attempts)
    assert span.attributes["oomguard.setting.batch_size"] <= 4
    assert [event.name for event in span.events] == ["oomguard.incident"] * (
        len(fits_four.attempts) - 1
    )
    assert span.status.status_code is trace.StatusCode.UNSET
    assert span.start_time <= span.events[0].timestamp <= span.end_time


def test_a_call_that_is_given_up_is_a_span_with_an_error(registry, spans):
    with pytest.raises(RuntimeError, match="HIP out of memory"):
        never_fits([1])

    (span,) = finished(spans)
    assert span.status.status_code is trace.StatusCode.ERROR
    assert "HIP out of memory" in (span.status.description or "")
    found = values(registry)
    assert found[("oomguard_failed_attempts_total",)] > found[("oomguard_relaunches_total",)]


def test_a_loop_of_attempts_is_counted_and_told_like_a_call(registry, spans):
    for attempt in oomguard.attempts(batch_size=8):
        with attempt:
            if attempt.settings["batch_size"] > 4:
                raise RuntimeError(REFUSED)

    (span,) = finished(spans)
    assert span.status.status_code is trace.StatusCode.UNSET
    assert (
        values(registry)[("oomguard_attempts_total",)] == span.attributes["oomguard.attempts"] > 1
    )


def test_loop_that_fails_otherwise_is_not_ours(registry, spans):
    with pytest.raises(KeyError):
        for attempt in oomguard.attempts(batch_size=8):
            with attempt:
                raise KeyError("x")
    assert values(registry)[("oomguard_attempts_total",)] == 0
    assert finished(spans) == []


def test_engine_death_at_work_counts_once_and_keeps_its_hours(registry):
    started = Attempt(1, {}, seconds=3600.0)
    guarded_calls.count_attempt(started)
    for _ in range(2):  # and dies again after it was made again
        guarded_calls.count_death(started, Attempt(1, {}, error="EngineDeadError", seconds=3600.0))
        guarded_calls.count_attempt(Attempt(2, {}))
        started = Attempt(2, {})

    found = values(registry)
    assert found[("oomguard_failed_attempts_total",)] == 2
    assert found[("oomguard_attempts_total",)] == 3
    assert found[("oomguard_failed_attempts_seconds_total",)] == 0
    guarded_calls.end_call()


def test_metrics_enabled_twice_are_registered_once(registry, fits_four):
    oomguard.enable_metrics(registry)
    fits_four(list(range(8)))
    assert values(registry)[("oomguard_attempts_total",)] == len(fits_four.attempts)


def test_names_that_a_registry_has_already_are_refused():
    from prometheus_client import Counter

    taken = CollectorRegistry()
    Counter("oomguard_attempts", "another's", registry=taken)
    with pytest.raises(ValueError, match="oomguard_attempts"):
        oomguard.enable_metrics(taken)


def test_metrics_are_in_the_programs_registry_by_default():
    code = "import oomguard, prometheus_client\noomguard.enable_metrics()\nprint(prometheus_client.generate_latest().decode())"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert scraped(ran.stdout)[("oomguard_attempts_total",)] == 0


def test_without_the_library_the_extra_is_named():
    code = "import sys\nsys.modules['prometheus_client'] = None\nimport oomguard\noomguard.enable_metrics()"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert install_hint("metrics") in ran.stderr


def test_remedied_call_loads_no_library_that_the_program_lacks():
    ran = subprocess.run(
        [sys.executable, "-c", GUARDED], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.strip() == "[]"


def test_what_is_no_registry_is_refused_with_what_to_pass():
    with pytest.raises(SettingError, match="got 'x'") as caught:
        oomguard.enable_metrics(registry="x")
    assert "CollectorRegistry" in str(caught.value)
    assert "enable_metrics()" in (caught.value.hint or "")
