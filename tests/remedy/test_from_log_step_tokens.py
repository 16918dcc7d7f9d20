"""A step of prompts is cut to so many tokens that the refused tensor fits; nothing else follows from its figures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Incident
from oomguard.remedy.from_log import step_tokens_for_tried

sizes = st.integers(1, 2**38)


def incident(phase: str = "prefill", **values: int | bool) -> Incident:
    return Incident(
        "cuda_oom",
        "",
        phase=phase,
        facts={name: Fact(name, value) for name, value in values.items()},
    )


@given(sizes, sizes, st.integers(1, 131072))
def test_what_was_refused_fits_in_what_was_free(tried, free, tokens):
    value = step_tokens_for_tried(
        incident(tried_bytes=tried, device_free_bytes=free, max_num_batched_tokens=tokens)
    ).value

    if value is not None:
        assert tried * value / tokens <= free
        assert 512 <= value < tokens


def test_tokens_that_ran_count_if_below_the_limit():
    figures = {
        "tried_bytes": 4 * GIB,
        "device_free_bytes": 2 * GIB,
        "max_num_batched_tokens": 16384,
    }

    assert step_tokens_for_tried(incident(**figures)).value == 7168
    assert step_tokens_for_tried(incident(**figures, step_tokens=4096)).value == 1792


def test_no_step_is_small_enough_for_other_refused_tokens(subtests):
    for name, more, why in [
        ("an encoder's input", {"multimodal_frames": True}, "an encoder reads an image at once"),
        ("enough was free", {"device_free_bytes": 5 * GIB}, "so the step is not too large"),
        ("nearly nothing was free", {"device_free_bytes": 1 << 20}, "with 1.00 MiB free"),
    ]:
        with subtests.test(name):
            figures = {
                "tried_bytes": 4 * GIB,
                "device_free_bytes": 2 * GIB,
                "max_num_batched_tokens": 8192,
            }
            solution = step_tokens_for_tried(incident(**{**figures, **more}))

            assert solution.value is None
            assert why in solution.reason


def test_a_step_of_decoding_has_no_prompt_to_cut():
    figures = {"tried_bytes": 4 * GIB, "device_free_bytes": 2 * GIB, "max_num_batched_tokens": 8192}

    assert step_tokens_for_tried(incident("decode", **figures)).value is None
