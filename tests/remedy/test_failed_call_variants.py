"""Another way to run a call is chosen from what failed, and refused with its reason."""

from __future__ import annotations

from oomguard.remedy.failed_call import CACHE, CHUNK, Variant, solve_variant


def free(now=None, row_bytes=lambda value: None, *, is_changed=False):
    return Variant(now, lambda value: None, row_bytes, is_changed)


def refused(now=None):
    return Variant(now, lambda value: f"not {value}")


def test_chunk_is_at_most_a_quarter_of_prompt_and_fitting_tokens(subtests):
    for now, share, chunk in (
        (8192, 1.0, 2048),
        (8192, 0.1, 512),
        (512, 1.0, 128),
        (100, 0.1, 32),
        (33, 1.0, 32),
    ):
        with subtests.test(now=now, share=share):
            assert solve_variant(CHUNK, free(now), None, share).value == chunk


def test_a_prompt_as_short_as_the_smallest_chunk_is_not_cut():
    found = solve_variant(CHUNK, free(32), None, 1.0)
    assert found.value is None
    assert "32 tokens at once failed" in found.reason


def test_a_cache_that_failed_is_not_chosen_again():
    assert solve_variant(CACHE, free(), None, 1.0).value == "offloaded"
    assert solve_variant(CACHE, free("offloaded"), None, 1.0).value == "offloaded_static"


def test_the_most_tokens_that_fit_in_closed_form_are_kept():
    needs = free(100, lambda tokens: 1000 + 10 * tokens)
    assert solve_variant("max_new_tokens", needs, 1500, 0.5).value == 50
    again = free(50, lambda tokens: 1000 + 10 * tokens, is_changed=True)
    assert solve_variant("max_new_tokens", again, 1500, 0.5).value == 25


def test_tokens_are_cut_by_what_the_row_held():
    assert solve_variant("truncate_prompt_tokens", free(100), 1500, 0.5).value == 50
    assert solve_variant("truncate_prompt_tokens", free(100), 1500, 1.0).value == 90
    assert solve_variant("truncate_prompt_tokens", free(100), None, 1.0).value is None


def test_an_answer_of_a_few_tokens_is_no_answer():
    found = solve_variant("max_new_tokens", free(100, lambda tokens: 1000 + 10 * tokens), 1050, 0.5)
    assert found.value is None
    assert "5 of 100 new tokens fit" in found.reason


def test_what_the_call_refuses_is_the_reason(subtests):
    for setting, now in (
        ("attn_implementation", None),
        (CHUNK, 512),
        (CACHE, None),
        ("max_new_tokens", 64),
    ):
        with subtests.test(setting):
            found = solve_variant(setting, refused(now), 1000, 0.9)
            assert found.value is None
            assert found.reason.startswith("not ")
