"""Lines that a container runtime cut into pieces are read as they were printed, wherever they were cut."""

import io
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard import diagnose
from oomguard.diagnosis import diagnose_stream
from oomguard.scan.lines import join_pieces
from oomguard.scan.source import MAX_SEGMENT_CHARS, Gap, Line
from tests.scan.runtime_logs import FAILURE, HEALTHY, pieces_of, tagged


def texts(lines, **how):
    numbered = [Line(number, 0, text) for number, text in enumerate(lines, 1)]
    return [line.text for line in join_pieces(numbered, **how) if isinstance(line, Line)]


def told(text):
    found = diagnose(text)
    facts = [{name: fact.value for name, fact in one.facts.items()} for one in found.incidents]
    return [
        (one.kind, values, one.plan, one.location.process)
        for one, values in zip(found.incidents, facts, strict=True)
    ]


@pytest.mark.parametrize("size", [17, 60, 120, 200, 240, 1000])
def test_failure_cut_anywhere_is_one_incident_with_equal_numbers(size):
    whole = told("".join(tagged(FAILURE)))
    assert len(whole) == 1
    assert told("".join(pieces_of(FAILURE, size))) == whole


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), size=st.integers(12, 400))
def test_pieces_of_both_streams_may_take_turns(seed, size):
    draw = random.Random(seed)
    out, err = pieces_of(HEALTHY, size, "stdout"), pieces_of(FAILURE, size)
    mixed = []
    while out or err:
        mixed.append((out if not err or (out and draw.random() < 0.5) else err).pop(0))
    lines = texts([line.rstrip("\n") for line in mixed])
    for stream, printed in (("stdout", HEALTHY), ("stderr", FAILURE)):
        assert [line.split(" ", 3)[3] for line in lines if f" {stream} " in line] == printed


def test_the_line_is_at_the_place_of_its_first_piece():
    lines = [
        Line(n, n * 100, text.rstrip("\n"))
        for n, text in enumerate(pieces_of(["x" * 100, "y"], 30), 1)
    ]
    assert [(line.number, line.byte) for line in join_pieces(lines)] == [(1, 100), (5, 500)]


def test_line_without_an_end_is_read_as_far_as_it_goes():
    cut = pieces_of(["x" * 100], 30)
    assert texts([line.rstrip("\n") for line in cut[:2]])[0].endswith("x" * 60)
    gap = [Line(1, 0, cut[0].rstrip("\n")), Gap(), Line(9, 900, cut[-1].rstrip("\n"))]
    assert [type(one) for one in join_pieces(gap)] == [Line, Gap, Line]


def test_no_line_makes_memory_grow():
    lines = [line.rstrip("\n") for line in pieces_of(["x" * (3 * MAX_SEGMENT_CHARS)], 16384)]
    read = texts(lines)
    assert max(map(len, read)) <= MAX_SEGMENT_CHARS + 16384 + 100
    assert sum(text.count("x") for text in read) == 3 * MAX_SEGMENT_CHARS


@pytest.mark.parametrize("lines_around", [0, 3000, 60_000], ids=["short", "many-lines", "blocks"])
def test_failure_inside_a_long_log_is_found_at_cut_anchors(lines_around):
    around = "".join(tagged(f"GET /metrics {n}" for n in range(lines_around)))
    pieces = pieces_of(FAILURE, 25)
    found = diagnose_stream(io.BytesIO(f"{around}{''.join(pieces)}{around}".encode()))
    assert [one.kind for one in found.incidents] == ["kv_cache_too_small_for_max_len"]


def as_json(pieces, **more):
    """The same lines as a collector keeps them; without a tag as Docker does."""
    found = []
    for line in pieces:
        at, stream, tag, text = line.rstrip("\n").split(" ", 3)
        named = {"logtag": tag} if more else {}
        found.append(
            json.dumps(
                {
                    "log": text + ("" if more or tag == "P" else "\n"),
                    "stream": stream,
                    **named,
                    **more,
                    "time": at,
                }
            )
            + "\n"
        )
    return found


@pytest.mark.parametrize("size", [60, 200])
@pytest.mark.parametrize("lines_around", [0, 60_000], ids=["short", "blocks"])
def test_pieces_whose_tags_a_collector_kept_in_json_are_joined(size, lines_around):
    around = "".join(
        as_json(
            tagged(f"GET /metrics {n}" for n in range(lines_around)), kubernetes={"pod_name": "llm"}
        )
    )
    pieces = "".join(as_json(pieces_of(FAILURE, size), kubernetes={"pod_name": "llm"}))
    found = diagnose_stream(io.BytesIO(f"{around}{pieces}{around}".encode()))
    assert [one.kind for one in found.incidents] == ["kv_cache_too_small_for_max_len"]
    assert found.incidents[0].plan[0].new == 1792


def test_docker_line_cut_at_16_kib_is_joined_but_no_json_log():
    long = ["=" * 16200 + FAILURE[5], *FAILURE[6:]]
    assert [kind for kind, *_ in told("".join(as_json(pieces_of(long, 16384))))] == [
        "kv_cache_too_small_for_max_len"
    ]
    stripped = [json.dumps({"log": text, "stream": "stderr", "time": "x"}) for text in FAILURE]
    assert texts(stripped) == stripped


def test_what_is_no_line_of_a_runtime_passes_unchanged():
    lines = [
        "INFO stderr P x",
        "2026-11-25 05:14:10 stderr P x",
        json.dumps({"log": "x", "stream": "stderr"}),
        "",
    ]
    assert texts(lines) == lines


def test_a_tag_may_have_more_tags_behind_it():
    stamp = "2026-11-25T05:14:10.123456789Z stderr"
    assert texts([f"{stamp} P:a ab", f"{stamp} F:a:b cd"]) == [f"{stamp} P:a abcd"]
