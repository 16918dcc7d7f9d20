"""Spans of a run, taken by a collector that speaks OTLP over HTTP, through OpenTelemetry's own SDK and exporter."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from oomguard.telemetry.spans import DELIVER_S, is_enabled, table
from support.counted import run

pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed"
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE = "0af7651916cd43dd8448eb211c80319c"
ABOVE = f"00-{TRACE}-b7ad6b7169203331-01"
TELLS = (
    sys.executable,
    "-c",
    "import json, os; print(json.dumps({n: os.environ.get(n) for n in ('TRACEPARENT', 'TRACESTATE')}))",
)


class Collector(ThreadingHTTPServer):
    """Keeps the spans that it is sent."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.spans, self.scopes = status, [], set()

    @property
    def env(self) -> dict[str, str]:
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.server_port}"}

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.scopes.add((scope.scope.name, scope.scope.version))
                self.server.spans += scope.spans
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    server = Collector(getattr(request, "param", 200))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def attributes(one: Any) -> dict[str, Any]:
    values = {}
    for each in one.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        values[each.key] = (
            [v.string_value for v in value.values] if kind == "array_value" else value
        )
    return values


def test_run_is_a_span_with_one_child_per_attempt(collector):
    ran = run(**collector.env)
    assert ran.returncode == 0, ran.stderr

    (whole,), (first, second) = collector.named("oomguard.run"), collector.named("oomguard.attempt")
    assert first.parent_span_id == second.parent_span_id == whole.span_id
    assert whole.parent_span_id == b""
    assert whole.start_time_unix_nano <= first.start_time_unix_nano < first.end_time_unix_nano
    assert (
        first.end_time_unix_nano
        <= second.start_time_unix_nano
        < second.end_time_unix_nano
        <= whole.end_time_unix_nano
    )
    assert [span.status.code for span in (whole, first, second)] == [0, 2, 0]  # unset, error, unset
    assert attributes(whole)["oomguard.attempts"] == 2
    assert attributes(whole)["process.exit.code"] == 0
    assert attributes(second)["oomguard.setting.max_model_len"] == 1792
    (event,) = first.events
    told = attributes(event)
    assert event.name == "oomguard.incident"
    assert told["oomguard.incident.kind"] == "kv_cache_too_small_for_max_len"
    assert told["oomguard.incident.cause"] == "max_model_len_too_large"
    assert told["oomguard.fact.max_model_len_tokens"] == 32768
    assert first.status.message == told["oomguard.incident.headline"]
    assert list(second.events) == []


def test_what_is_sent_stands_in_the_table(collector):
    run(**collector.env)
    names = {
        name: [a["name"] for a in table()["attribute"] if name in a["on"]]
        for name in _sent(collector)
    }
    assert set(names) == {"oomguard.run", "oomguard.attempt", "oomguard.incident"}
    for name, sent in _sent(collector).items():
        unknown = {
            key
            for key in sent
            if not any(key == n or (n[-1] == "." and key.startswith(n)) for n in names[name])
        }
        assert unknown == set(), name


def _sent(collector: Collector) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for span in collector.spans:
        for one in (span, *span.events):
            found.setdefault(one.name, set()).update(attributes(one))
    return found


def test_trace_of_the_environment_continues_to_the_command(collector):
    ran = run(command=TELLS, TRACEPARENT=ABOVE, TRACESTATE="vendor=1", **collector.env)

    (whole,), (attempt,) = collector.named("oomguard.run"), collector.named("oomguard.attempt")
    assert whole.trace_id.hex() == attempt.trace_id.hex() == TRACE
    assert whole.parent_span_id.hex() == "b7ad6b7169203331"
    assert json.loads(ran.stdout) == {
        "TRACEPARENT": f"00-{TRACE}-{attempt.span_id.hex()}-01",
        "TRACESTATE": "vendor=1",
    }


def test_unsampled_trace_stays_so_and_sends_nothing(collector):
    ran = run(command=TELLS, TRACEPARENT=ABOVE[:-2] + "00", **collector.env)
    assert json.loads(ran.stdout)["TRACEPARENT"].endswith("-00")
    assert collector.spans == []


def test_environment_of_the_command_is_unchanged_by_default():
    assert json.loads(run(command=TELLS, TRACEPARENT=ABOVE).stdout) == {
        "TRACEPARENT": ABOVE,
        "TRACESTATE": None,
    }


def test_a_broken_trace_in_the_environment_is_not_followed(collector):
    run(command=("true",), TRACEPARENT="00-nonsense", **collector.env)
    (whole,) = collector.named("oomguard.run")
    assert whole.parent_span_id == b""


def test_secrets_of_the_command_are_not_sent(collector):
    run(command=("sh", "-c", "exit 1", "--api-key", "abcdefgh12345"), **collector.env)
    (whole,) = collector.named("oomguard.run")
    assert attributes(whole)["process.command_args"] == ["sh", "-c", "exit 1", "--api-key", "***"]
    assert whole.status.code == 2


def test_command_that_cannot_start_is_a_span_with_an_error(collector):
    ran = run(command=("no-such-command",), **collector.env)
    assert ran.returncode == 127
    (whole,), (attempt,) = collector.named("oomguard.run"), collector.named("oomguard.attempt")
    assert whole.status.code == attempt.status.code == 2
    assert whole.status.message == "not started"


@pytest.mark.parametrize("collector", [500], indirect=True)
def test_refusing_collector_costs_one_line_and_no_command(collector):
    ran = run(command=("echo", "ran"), **collector.env)
    assert (ran.returncode, ran.stdout) == (0, "ran\n")
    (line,) = ran.stderr.splitlines()
    assert line.startswith("oomguard: Spans are lost because the collector did not accept them")


def test_unresponsive_collector_delays_the_end_by_a_stated_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        ran = run(command=("true",), OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
        took = time.monotonic() - began
    assert ran.returncode == 0
    assert "Spans are lost because the collector did not accept them" in ran.stderr
    assert (
        took < 20
    )  # DELIVER_S, and what a loaded machine takes to start; the exporter itself would go on for longer
    assert DELIVER_S <= 3


def test_console_exporter_leaves_standard_output_to_the_command():
    ran = run(command=("echo", "ran"), OTEL_TRACES_EXPORTER="console")
    assert ran.stdout == "ran\n"
    assert '"name": "oomguard.run"' in ran.stderr


def test_missing_package_is_reported_and_the_command_runs():
    for env, why in [
        (
            {"OTEL_TRACES_EXPORTER": "zipkin"},
            "no exporter zipkin is installed: pip install opentelemetry-exporter-zipkin",
        ),
        (
            {"OTEL_TRACES_EXPORTER": "mine"},
            "a package that provides mine for opentelemetry_traces_exporter",
        ),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "carrier-pigeon"}, "one of grpc, http/protobuf"),
    ]:
        ran = run(command=("echo", "ran"), OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", **env)
        assert (ran.returncode, ran.stdout) == (0, "ran\n"), (env, why)
        assert why in ran.stderr, (env, why)


def test_spans_are_on_with_an_exporter_or_an_endpoint():
    for env, asked in [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_PYTHON_LOG_CORRELATION": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, False),
    ]:
        assert is_enabled(env) is asked, (env, asked)


def test_waited_seconds_for_a_collector_are_the_real_ones():
    ran = run(command=("true",), OTEL_EXPORTER_OTLP_ENDPOINT="not-a-url")
    found = re.search(r"waited_s=([\d.]+) ", ran.stderr)
    assert found
    assert float(found[1]) < DELIVER_S  # what cannot be sent is given up at once
