"""Requests that a command served, told from its output, also where only a part of it is kept."""

from __future__ import annotations

from oomguard.analyst import side_effects
from oomguard.analyst.side_effects import served_requests
from oomguard.supervisor import output_buffer as module
from oomguard.supervisor.output_buffer import OutputBuffer
from support.each import each

POST = b'INFO:     127.0.0.1:41882 - "POST /v1/completions HTTP/1.1" 200 OK\n'
RECEIVED = b"INFO 11-22 06:40:43 [logger.py:43] Received request cmpl-5f: params: SamplingParams(n=1), lora_request: None.\n"
STEP = b"step 17 of the training: loss 0.4711\n"


def throughput(prompt: float, generation: float, process: bytes = b"(APIServer pid=1) ") -> bytes:
    figures = f"Avg prompt throughput: {prompt} tokens/s, Avg generation throughput: {generation} tokens/s, Running: 0 reqs\n"
    return process + b"INFO 11-22 06:40:43 [loggers.py:127] Engine 000: " + figures.encode()


def counted(*parts: bytes) -> int | None:
    recording = OutputBuffer()
    for part in parts:
        recording.write(1, memoryview(part))
    found = served_requests(recording)
    recording.close()
    return found


@each(
    ("output", "count"),
    [
        (POST * 3, 3),
        (b"(APIServer pid=1) " + POST, 1),
        (POST.replace(b"200 OK", b"201 Created"), 1),
        (POST.replace(b"/v1/completions", b"/v1/chat/completions?x=1"), 1),
        (POST.rstrip(b"\n"), 1),
        (RECEIVED * 2, 2),
        (RECEIVED.replace(b"params: ", b"prompt: 'the quick', params: "), 1),
        (RECEIVED * 2 + POST * 2, 2),
        (throughput(0.0, 3.5), None),
    ],
)
def test_a_server_s_own_words_count(output, count):
    assert counted(STEP, output, STEP) == count


@each(
    "output",
    [
        POST.replace(b"200 OK", b"500 Internal Server Error"),
        POST.replace(b"200 OK", b"400 Bad Request"),
        POST.replace(b"POST /v1/completions", b"GET /v1/models"),
        POST.replace(b"POST /v1/completions", b"GET /health"),
        POST.replace(b"/v1/completions", b"/health"),
        POST.replace(b"/v1/completions", b"/tokenize"),
        POST.replace(b"/v1/completions", b"/ping/"),
        b'10.0.0.1 - - [22/Nov/2026] "POST /login HTTP/1.1" 200 512\n',
        b"Received request to stop\n",
        throughput(0.0, 0.0),
        throughput(12.0, 3.5, process=b""),
    ],
)
def test_what_is_no_request_or_was_not_served_does_not_count(output):
    assert counted(STEP, output * 3, STEP) == 0


def test_a_line_that_two_slots_share_counts_once(monkeypatch):
    monkeypatch.setattr(module, "SLOT_BYTES", 4096)
    for cut in range(1, len(POST)):
        before = b"x" * (4096 - cut - 1) + b"\n"
        assert counted(before + POST + STEP) == 1
        assert counted(before + POST + POST) == 2


def test_slot_without_a_line_end_keeps_a_line_whole(monkeypatch):
    monkeypatch.setattr(module, "SLOT_BYTES", 32)
    assert len(POST) > 2 * 32
    assert counted(POST) == 1
    assert counted(b"x\n" + POST * 3) == 3


def test_beyond_many_nothing_is_counted_any_more(monkeypatch):
    monkeypatch.setattr(side_effects, "MOST", 10)
    assert counted(*[POST * 7] * 5) == 10
