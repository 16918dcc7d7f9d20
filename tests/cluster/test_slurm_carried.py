"""The changes in a job's comment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.cluster.slurm import (
    decode_comment,
    encode_comment,
    merge_comment,
    permitted_changes,
)
from oomguard.core.settings import SETTINGS
from oomguard.remedy.policy import make_policy
from support.each import each

VALUES = st.one_of(
    st.booleans(), st.integers(-(10**12), 10**12), st.floats(allow_nan=False), st.text(max_size=20)
)
STATES = st.dictionaries(st.sampled_from(sorted(set(SETTINGS) - {"device"})), VALUES, max_size=4)


@given(state=STATES, text=st.text(max_size=60))
def test_what_a_comment_carries_is_read_back(state, text):
    assert decode_comment(encode_comment(state, f"oomguard: {text}") or "") == state


@given(users=st.text(max_size=60), state=STATES, text=st.text(max_size=60))
def test_users_own_comment_stays_in_front_of_ours(users, state, text):
    users = users.replace("oomguard", "")
    first = merge_comment(users, encode_comment(state, f"oomguard: {text}"))
    assert merge_comment(first, "oomguard: ended") == merge_comment(users, "oomguard: ended")
    assert decode_comment(first) == state
    assert first.startswith(users)


@given(st.text())
def test_other_comments_hold_nothing_or_existing_settings(text):
    assert set(decode_comment(text)) <= set(SETTINGS)
    assert set(decode_comment(f"oomguard {text}")) <= set(SETTINGS)


@each(
    "comment",
    [
        "",
        "(null)",
        "oomguard: ended",
        'oomguard {"max_model_len": 5',
        "oomguard [1]: x",
        'oomguard {"max_model_len": [1]}: x',
        'oomguard {"a": 1}: x',
    ],
)
def test_a_comment_without_changes_carries_none(comment):
    assert decode_comment(comment) == {}


def test_which_device_had_room_is_not_carried():
    assert encode_comment({"device": "0"}, "oomguard: ended") == "oomguard: ended"


def test_changes_too_long_for_a_comment_are_not_cut():
    assert encode_comment({"dtype": "x" * 2000}, "oomguard: ended") is None


@each(
    ("options", "refused"),
    [
        ({}, ()),
        ({"pinned": ["max_model_len"]}, ("max_model_len=1792 (pinned)",)),
        ({"minimum": {"max_model_len": 4096}}, ("max_model_len=1792 (below your floor of 4096)",)),
        (
            {"allow": "output-preserving"},
            ("max_model_len=1792 (--allow output-preserving does not permit reduces-capacity)",),
        ),
    ],
)
def test_what_the_run_s_own_words_forbid_is_left_out(options, refused):
    patches, left_out = permitted_changes({"max_model_len": 1792}, make_policy(**options), "why")

    assert left_out == refused
    assert bool(patches) != bool(refused)
