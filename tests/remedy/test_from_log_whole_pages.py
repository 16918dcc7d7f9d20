"""Each request of a step of decoding gets a page of what was free; which backend takes such a page is for the user to know."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.facts import Fact
from oomguard.core.incident import Incident
from oomguard.remedy.from_log import page_for_requests

tokens = st.integers(1, 1 << 24)


def incident(phase: str = "decode", **values: int) -> Incident:
    return Incident(
        "kv_slots_exhausted",
        "",
        phase=phase,
        facts={name: Fact(name, value) for name, value in values.items()},
    )


@given(tokens, tokens)
def test_as_many_pages_are_free_as_requests_need_one(free, needed):
    solution = page_for_requests(incident(kv_slots_free_tokens=free, kv_slots_needed_tokens=needed))

    if solution.value is not None:
        assert free // solution.value >= needed
        assert solution.blocked_by is not None


def test_small_enough_pages_are_not_what_is_missing():
    figures = {"kv_slots_free_tokens": 4096, "kv_slots_needed_tokens": 100}

    assert page_for_requests(incident(**figures, block_size_tokens=64)).value == 32
    assert page_for_requests(incident(**figures, block_size_tokens=32)).value is None


def test_prompt_needs_many_pages_of_an_unprinted_number():
    assert (
        page_for_requests(
            incident("prefill", kv_slots_free_tokens=4096, kv_slots_needed_tokens=100)
        ).value
        is None
    )
