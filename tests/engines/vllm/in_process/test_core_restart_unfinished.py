"""Requests that outlive their engine: each goes on where its caller left off, or is computed once more, and is delivered once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from oomguard.engines.vllm.in_process.core_restart import (
    UnfinishedRequests,
    follows_from_tokens,
    repeats_tokens,
)


@dataclass
class Params:
    """As vLLM's SamplingParams: fields of a msgspec struct, with its defaults."""

    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    structured_outputs: Any = None
    watermarking: bool | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    __struct_fields__ = (
        "temperature",
        "seed",
        "max_tokens",
        "min_tokens",
        "prompt_logprobs",
        "presence_penalty",
        "structured_outputs",
        "watermarking",
        "bad_words",
        "thinking_token_budget",
    )


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int] | None = field(default_factory=lambda: [1, 2, 3])
    sampling_params: Params | None = field(default_factory=lambda: Params(temperature=0.0))
    mm_features: list[Any] | None = None
    resumable: bool = False


@dataclass
class Output:
    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None


@dataclass
class Outputs:
    outputs: list[Output]


def told(
    unfinished: UnfinishedRequests, name: str, *tokens: int, finish: str | None = None
) -> list[list[int]]:
    """What an output of an engine delivers, the tokens of each output that is left."""
    return [
        out.new_token_ids
        for out in unfinished.take(
            Outputs([Output(name, list(tokens), finish_reason=finish)])
        ).outputs
    ]


def test_a_request_goes_on_behind_the_tokens_that_were_delivered():
    unfinished = UnfinishedRequests()
    unfinished.add(
        Request(
            "a",
            sampling_params=Params(temperature=0.0, max_tokens=10, min_tokens=2, prompt_logprobs=1),
        )
    )
    told(unfinished, "a", 7)
    told(unfinished, "a", 8, 9)

    (resumed,) = unfinished.begin_again(alone=False)
    assert resumed.prompt_token_ids == [1, 2, 3, 7, 8, 9]
    assert resumed.sampling_params == Params(temperature=0.0, max_tokens=7, min_tokens=0)


def test_a_second_death_goes_on_behind_all_that_was_delivered():
    unfinished = UnfinishedRequests()
    unfinished.add(Request("a"))
    told(unfinished, "a", 7)
    unfinished.begin_again(alone=False)
    told(unfinished, "a", 8)

    assert unfinished.begin_again(alone=False)[0].prompt_token_ids == [1, 2, 3, 7, 8]


def test_only_what_follows_from_the_tokens_goes_on(subtests):
    for params, goes_on in [
        (Params(temperature=0.0), True),
        (Params(temperature=0.0, seed=1), True),
        (Params(temperature=0.0, watermarking=False, bad_words=[]), True),
        (Params(temperature=0.0, thinking_token_budget=0), False),
        (Params(temperature=1.0), True),
        (Params(temperature=1.0, seed=1), False),
        (Params(temperature=0.0, presence_penalty=0.5), False),
        (Params(temperature=0.0, structured_outputs={"json": {}}), False),
    ]:
        with subtests.test(params=params, goes_on=goes_on):
            assert follows_from_tokens(Request("a", sampling_params=params)) is goes_on


def test_dependent_output_is_recomputed_and_delivered_once():
    unfinished = UnfinishedRequests()
    unfinished.add(Request("a", sampling_params=Params(temperature=1.0, seed=3)))
    told(unfinished, "a", 7)
    told(unfinished, "a", 8)

    (again,) = unfinished.begin_again(alone=False)
    assert again.prompt_token_ids == [1, 2, 3]
    assert told(unfinished, "a", 7) == []
    assert told(unfinished, "a", 8, 9) == [[9]]
    assert told(unfinished, "a", 10, finish="stop") == [[10]]
    assert (unfinished.differing(), len(unfinished)) == ([], 0)


def test_other_tokens_when_computed_once_more_are_not_spliced():
    unfinished = UnfinishedRequests()
    unfinished.add(Request("a", sampling_params=Params(temperature=1.0, seed=3)))
    told(unfinished, "a", 7)
    unfinished.begin_again(alone=False)
    assert told(unfinished, "a", 6) == []
    assert told(unfinished, "a", 9) == []

    assert unfinished.differing() == ["a"]


def test_ending_earlier_when_computed_once_more_is_differing_too():
    unfinished = UnfinishedRequests()
    unfinished.add(Request("a", sampling_params=Params(temperature=1.0, seed=3)))
    told(unfinished, "a", 7, 8)
    unfinished.begin_again(alone=False)
    assert told(unfinished, "a", 7, finish="stop") == []
    assert unfinished.differing() == ["a"]


def test_inexact_numbers_recompute_only_grammars():
    drawn, grammar = (
        Params(temperature=1.0, seed=3),
        Params(temperature=0.0, structured_outputs={"json": {}}),
    )
    found = [
        repeats_tokens(Request("a", sampling_params=p), is_exact=exact)
        for p in (drawn, grammar)
        for exact in (True, False)
    ]
    assert found == [True, False, True, True]


def test_unseeded_grammar_output_is_lost_once_begun():
    unfinished = UnfinishedRequests()
    unfinished.add(
        Request("a", sampling_params=Params(temperature=1.0, structured_outputs={"json": {}}))
    )
    assert unfinished.lost() == {}
    told(unfinished, "a", 7)
    assert list(unfinished.lost()) == ["a"]


def test_finished_and_given_up_requests_are_not_sent_again():
    unfinished = UnfinishedRequests()
    for name in "abc":
        unfinished.add(Request(name))
    told(unfinished, "a", 7, finish="stop")
    unfinished.drop(["b", "unknown"])

    assert [request.request_id for request in unfinished.begin_again(alone=False)] == ["c"]


def test_suspects_run_one_at_a_time_and_others_afterwards():
    unfinished = UnfinishedRequests()
    for name in "abcd":
        unfinished.add(Request(name))

    assert [
        r.request_id for r in unfinished.begin_again(alone=True, suspects={"b", "c", "gone"})
    ] == ["b"]
    assert not unfinished.add(Request("new"))
    assert unfinished.next() == []
    told(unfinished, "b", 7, finish="stop")
    assert [r.request_id for r in unfinished.next()] == ["c"]
    unfinished.drop(["c"])
    assert [r.request_id for r in unfinished.next()] == ["a", "d", "new"]
    assert unfinished.add(Request("later"))


def test_the_request_that_ran_alone_is_at_fault():
    unfinished = UnfinishedRequests()
    for name in "ab":
        unfinished.add(Request(name))

    assert unfinished.at_fault(1) is None
    unfinished.begin_again(alone=True)
    assert unfinished.at_fault(2) is None
    unfinished.begin_again(alone=True, suspects=["a"])
    assert unfinished.at_fault(2) == "a"


def test_requests_run_together_once_the_culprit_is_known():
    unfinished = UnfinishedRequests()
    for number in range(9):
        unfinished.add(Request(str(number)))
    unfinished.begin_again(alone=True, suspects=["3", "7"])
    assert unfinished.at_fault(1) == "3"
    unfinished.drop(["3"])
    assert [r.request_id for r in unfinished.begin_again(alone=True, suspects=["3"])] == ["7"]
    told(unfinished, "7", 1, finish="stop")
    assert len(unfinished.next()) == 7


def test_request_in_both_last_steps_runs_alone():
    unfinished = UnfinishedRequests()
    for name in "ab":
        unfinished.add(Request(name))
    assert len(unfinished.begin_again(alone=False, suspects=["a", "b"])) == 2
    told(unfinished, "b", 7)
    assert [r.request_id for r in unfinished.begin_again(alone=False, suspects=["a", "b"])] == ["a"]


def test_tokens_that_are_only_computed_once_more_are_no_progress():
    unfinished = UnfinishedRequests()
    unfinished.add(Request("a", sampling_params=Params(temperature=1.0, seed=3)))
    told(unfinished, "a", 7, 8)
    unfinished.begin_again(alone=False)
    told(unfinished, "a", 7)
    assert not unfinished.progressed
    told(unfinished, "a", 8)
    assert not unfinished.progressed
    told(unfinished, "a", 9)
    assert unfinished.progressed


@dataclass
class Feature:
    mm_hash: str
    data: Any


def test_omitted_image_is_resent_or_the_request_is_lost():
    unfinished = UnfinishedRequests()
    unfinished.add(Request("a", mm_features=[Feature("x", "pixels")]))
    unfinished.add(Request("b", mm_features=[Feature("x", None)]))
    unfinished.add(Request("c", mm_features=[Feature("y", None)]))
    assert list(unfinished.lost()) == ["c"]
    unfinished.drop(["c"])
    assert [r.mm_features[0].data for r in unfinished.begin_again(alone=False)] == [
        "pixels",
        "pixels",
    ]


def test_a_session_whose_parts_came_one_after_the_other_is_lost():
    unfinished = UnfinishedRequests()
    unfinished.add(Request("a", resumable=True))
    unfinished.add(Request("a"))
    assert list(unfinished.lost()) == ["a"]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
    st.lists(st.integers(0, 30), max_size=5),
    st.sampled_from(
        [Params(temperature=0.0, max_tokens=100), Params(temperature=1.0, seed=1, max_tokens=100)]
    ),
    st.integers(1, 4),
)
def test_each_token_is_delivered_once_and_in_order(tokens, deaths, params, per_step):
    """An engine that gives the same tokens for the same request, and dies after so many steps, any number of times."""
    unfinished, delivered = UnfinishedRequests(), []
    unfinished.add(Request("a", sampling_params=params))
    request, dies_after = Request("a", sampling_params=params), [*deaths, 1000]
    for steps in dies_after:
        left = tokens[len(request.prompt_token_ids) - 3 :]
        for step in range(min(steps, -(-len(left) // per_step))):
            part = left[step * per_step : (step + 1) * per_step]
            is_last = (step + 1) * per_step >= len(left)
            delivered += told(unfinished, "a", *part, finish="length" if is_last else None)
        if not len(unfinished):
            break
        (request,) = unfinished.begin_again(alone=False)
    assert [token for part in delivered for token in part] == tokens
