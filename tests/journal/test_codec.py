"""What the journal holds as the contract's JSON is read back as the record that it was written from."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.incident import Effect, Patch
from oomguard.journal.codec import incident_of, patch_of
from oomguard.report.json import incident_dict, json_line, patch_dict

OLD = Path(__file__).with_name("schema_1.sqlite3")


def test_an_incident_is_read_back_as_it_was_written():
    with contextlib.closing(sqlite3.connect(OLD)) as database:
        rows = [
            json.loads(text) for (text,) in database.execute("SELECT incident FROM attempt") if text
        ]

    assert len(rows) == 4
    for row in rows:
        row["budget"].setdefault("conflict", None)  # keys that later versions added
        row.setdefault("actions", [])
        for cause in row["causes"]:
            cause.setdefault("confirm", "")
        for patch in row["plan"]:
            patch.setdefault("permitted_by", None)
        assert json.loads(json_line(incident_dict(incident_of(row)))) == row


values = (
    st.none()
    | st.integers(1, 2**40)
    | st.floats(0.01, 1)
    | st.booleans()
    | st.sampled_from(["fp8", "auto"])
)


@given(
    old=values, new=values, effect=st.sampled_from(Effect), blocked=st.none() | st.just("pinned")
)
def test_a_patch_is_read_back_as_it_was_written(old, new, effect, blocked):
    patch = Patch(
        "max_model_len",
        old,
        new,
        effect,
        "it fits",
        "OG201",
        predicts={"x": 1.0},
        blocked_by=blocked,
    )

    assert patch_of(json.loads(json_line(patch_dict(patch)))) == patch


@given(
    row=st.dictionaries(
        st.sampled_from(
            [
                "setting",
                "from",
                "to",
                "effect",
                "predicts",
                "kind",
                "causes",
                "plan",
                "facts",
                "location",
                "budget",
            ]
        ),
        st.none()
        | st.integers()
        | st.text(max_size=3)
        | st.lists(st.integers(), max_size=2)
        | st.just({}),
    )
)
def test_object_of_another_version_is_read_as_far_as_known(row):
    assert patch_of(row).setting == (
        row.get("setting") if isinstance(row.get("setting"), str) else ""
    )
    assert incident_of(row).kind
