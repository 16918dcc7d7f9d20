"""A snapshot in each form of a report: the same figures, nothing of the file as markup."""

from __future__ import annotations

import io
import json
import pickle
import re
from typing import Any

import pytest
from rich.console import Console

from oomguard.core.incident import Diagnosis
from oomguard.diagnosis import diagnose_stream
from oomguard.report.html import to_html
from oomguard.report.json import to_json
from oomguard.report.markdown import to_markdown
from oomguard.report.panel import print_diagnosis
from support.made_snapshots import example

MIB = 2**20
MADE = example()


def read(whole: dict[str, Any]) -> Diagnosis:
    return diagnose_stream(io.BytesIO(pickle.dumps(whole)), "snapshot.pickle")


def on_terminal(diagnosis: Diagnosis, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding)
    print_diagnosis(Console(file=file, width=100, highlight=False), diagnosis)
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.fixture(scope="module")
def in_pieces() -> Diagnosis:
    return read(MADE.in_pieces())


FORMS = (on_terminal, to_markdown, to_html)


def words_of(form: Any, diagnosis: Diagnosis) -> str:
    return " ".join(re.sub(r"[│|]|<[^>]+>", " ", form(diagnosis)).split())


def test_every_form_tells_who_holds_what_and_where_there_is_room(in_pieces: Diagnosis):
    for form in FORMS:
        text = words_of(form, in_pieces)
        assert "memory snapshot, device 0" in text
        assert (
            "21.25 GiB in 47 segments and 100 blocks: 18.50 GiB in use, 2.75 GiB free between blocks in use."
            in text
        )
        assert re.search(r"14\.00 GiB\s+76%\s+28\s+job/model\.py:41 load_weights", text), (
            form.__name__
        )
        assert "private pool 0:1, large blocks" in text


def test_a_console_without_unicode_gets_ascii(in_pieces: Diagnosis):
    assert on_terminal(in_pieces, "ascii").isascii()


def test_json_has_the_snapshot_beside_what_was_there(in_pieces: Diagnosis):
    told = json.loads(to_json(in_pieces))
    device = told["snapshot"]["devices"][0]
    assert told["schema"] == 1
    assert told["snapshot"]["allocator_options"] == ""
    assert (device["reserved_total_bytes"], device["allocated_bytes"], device["blocks"]) == (
        22819110912,
        19865534464,
        100,
    )
    assert device["refused"]["largest_free_block_bytes"] == 256 * MIB
    assert device["refused"]["frames"][0] == {
        "file": "/job/model.py",
        "line": 140,
        "function": "logits",
    }
    assert device["stacks"][0]["blocks"] == 28
    assert device["pools"][1]["pool"] == [0, 1]
    assert "snapshot" not in json.loads(to_json(Diagnosis("a.log")))


def test_the_page_names_torchs_viewer_and_draws_nothing(in_pieces: Diagnosis):
    page = to_html(in_pieces)
    assert "python -m torch.cuda._memory_viz trace_plot snapshot.pickle -o snapshot.html" in page
    assert "<svg" not in page


def test_no_name_in_a_stack_becomes_markup_or_an_escape():
    made = MADE.Recorder()
    made.segment(
        [
            (
                MIB,
                "active_allocated",
                [{"filename": "/job/<script>\x1b[31m.py", "line": 1, "name": "a|b`<i>@me"}],
            )
        ]
    )
    found = read(made.snapshot())
    assert "<script>\x1b" not in to_html(found)
    assert "<i>@me" not in to_html(found)
    assert "<i>" not in to_markdown(found)
    assert "\x1b" not in on_terminal(found)


def test_home_folders_in_stacks_are_masked():
    made = MADE.Recorder()
    made.segment([(MIB, "active_allocated", MADE.stack(("/home/anna/job.py", 1, "main")))])
    assert "anna" not in to_json(read(made.snapshot()))


def freed_since(action: str) -> Diagnosis:
    """Return a snapshot of 90 MiB in use, refused twice and freed since."""
    made = MADE.Recorder()
    made.segment([(90 * MIB, "active_allocated", MADE.stack(("/job/model.py", 41, "load")))])
    made.refuse(100 * MIB, 3 * MIB, MADE.stack(("/job/first.py", 9, "ask")))
    made.refuse(20 * MIB, 3 * MIB, MADE.stack(("/job/model.py", 50, "ask")))
    for name in ("free_requested", action):
        made.traces[0].append(
            {"action": name, "addr": MADE.FIRST_ADDRESS, "size": 90 * MIB, "frames": []}
        )
    made.segments[0]["blocks"] = [{"size": 90 * MIB, "state": "inactive", "frames": []}]
    return read(made.snapshot())


def test_every_format_names_the_moment_and_the_first_refusal():
    first = "the last of 2 failed allocations in this history. The first: 100.00 MiB could not be allocated at job/first.py:9 ask."
    for form in FORMS:
        undone, lost = (
            words_of(form, freed_since(action)) for action in ("free_completed", "segment_unmap")
        )
        assert (
            "The snapshot was taken 2 events later. oomguard undid them, so the blocks are those at the failure."
            in undone
        )
        assert "It could use no free block; the device had 3.00 MiB free." in undone
        assert first in undone
        assert "The blocks are those at the snapshot, so they do not explain the failure." in lost
        assert "block that it could use" not in lost, form.__name__


def test_json_has_the_earlier_refusals_and_the_moment():
    device = json.loads(to_json(freed_since("segment_unmap")))["snapshot"]["devices"][0]
    assert device["earlier_refusals"] == [
        {
            "tried_bytes": 100 * MIB,
            "device_free_bytes": 3 * MIB,
            "frames": [{"file": "/job/first.py", "line": 9, "function": "ask"}],
        }
    ]
    assert (device["later_events"], device["blocks_are_later"]) == (2, True)
    assert device["refused"]["free_blocks_bytes"] is None
