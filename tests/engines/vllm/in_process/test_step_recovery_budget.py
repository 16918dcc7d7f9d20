"""What follows an out-of-memory in a step, without an engine."""

from __future__ import annotations

import random

from oomguard.engines.vllm.in_process.step_recovery import (
    MOST_FAILURES,
    MOST_OFFENDERS,
    QUIET_S,
    SMALL_TOKENS,
    FailedStep,
    StepBudget,
)

FULL = 2048


def failed(tokens: dict[str, int], *fresh: str, tried: int | None = None, **more) -> FailedStep:
    return FailedStep(tokens, set(fresh), tried, **more)


def test_each_failure_halves_the_steps_below_what_failed():
    budget = StepBudget(FULL)
    found = [budget.fail(failed({"a": n}, "a", tried=n), 0.0).budget_tokens for n in (2048, 1024)]
    assert found == [1024, 512]
    assert budget.ceiling_tokens == 1024


def test_requests_that_ran_before_keep_a_token_each():
    budget = StepBudget(FULL)
    tokens = {**{f"s{n}": 1 for n in range(10)}, "new": 10}
    decision = budget.fail(failed(tokens, "new"), 0.0)
    assert decision.budget_tokens == 15


def test_a_first_failure_at_a_size_that_worked_is_repeated():
    budget = StepBudget(FULL)
    budget.succeed(800, ())
    assert budget.fail(failed({"a": 1, "b": 1}), 0.0).budget_tokens == FULL
    assert budget.fail(failed({"a": 1, "b": 1}), 0.0).budget_tokens == 1


def test_a_fresh_request_that_fails_again_runs_alone():
    budget = StepBudget(FULL)
    tokens = {"old": 1, "new": 500}
    assert budget.fail(failed(tokens, "new"), 0.0).alone is None
    assert budget.fail(failed(tokens, "new"), 0.0).alone == "new"


def test_a_request_ends_after_two_failures_alone_in_small_steps():
    budget = StepBudget(FULL)
    small = failed({"a": SMALL_TOKENS}, "a", is_alone=True)
    assert budget.fail(small, 0.0).offender is None
    assert budget.fail(small, 0.0).offender == "a"


def test_a_size_that_does_not_shrink_with_the_step_ends_its_request():
    budget = StepBudget(FULL)
    assert budget.fail(failed({"a": 800}, "a", tried=5), 0.0).offender is None
    assert budget.fail(failed({"a": 400}, "a", tried=5), 0.0).offender == "a"


def test_a_size_that_shrinks_does_not_end_its_request():
    budget = StepBudget(FULL)
    found = [budget.fail(failed({"a": n}, "a", tried=n), 0.0) for n in (1600, 800, 400, 200, 100)]
    assert not any(decision.offender for decision in found)


def test_a_success_between_two_failures_clears_the_suspicion_of_a_small_step():
    budget = StepBudget(FULL)
    small = failed({"a": 1}, is_alone=True)
    for _ in range(5):
        assert budget.fail(small, 0.0).offender is None
        budget.succeed(1, ["a"])


def test_the_end_of_an_offender_restores_the_steps_of_the_others():
    budget = StepBudget(FULL)
    budget.succeed(1000, ())
    for n in (800, 400, 200):
        decision = budget.fail(failed({"a": n}, "a", tried=7), 0.0)
        if decision.offender:
            break
    assert decision.offender == "a"
    assert budget.current_tokens == FULL
    assert budget.ceiling_tokens is None


def test_a_prompt_that_cannot_be_split_ends_after_two_failures():
    budget = StepBudget(FULL)
    whole = failed({"a": 900}, "a", can_split=False)
    assert budget.fail(whole, 0.0).offender is None
    assert budget.fail(whole, 0.0).offender == "a"


def test_the_budget_doubles_after_quiet_times_and_stays_below_what_failed():
    budget = StepBudget(FULL)
    for n in (2048, 1024, 512):
        budget.fail(failed({"a": n}, "a", tried=n), 0.0)
    assert not budget.grow(QUIET_S / 2)
    sizes = []
    for turn in range(1, 5):
        budget.grow(turn * QUIET_S)
        sizes.append(budget.current_tokens)
    assert sizes == [511, 511, 511, 511]


def test_a_lowered_budget_is_learned_once_a_step_works_under_it():
    budget = StepBudget(FULL)
    budget.fail(failed({"a": 2048}, "a", tried=9), 0.0)
    assert budget.learned_tokens is None
    budget.succeed(1024, ["a"])
    assert budget.learned_tokens == 1024
    for _ in range(MOST_FAILURES + 1):
        decision = budget.fail(failed({"a": 1, "b": 1}), 0.0)
    assert decision.gives_up
    assert budget.learned_tokens == 1024


def test_nothing_is_learned_from_a_request_that_does_not_fit():
    budget = StepBudget(FULL)
    for n in (800, 400):
        decision = budget.fail(failed({"bad": n}, "bad", tried=7), 0.0)
    assert decision.offender == "bad"
    budget.succeed(8, ())
    assert budget.learned_tokens is None


def test_failures_that_never_stop_give_up():
    budget = StepBudget(FULL)
    pair = failed({"a": 1, "b": 1})
    found = [budget.fail(pair, 0.0).gives_up for _ in range(MOST_FAILURES + 1)]
    assert found.index(True) == MOST_FAILURES


def test_several_offenders_in_a_row_are_checked_and_old_ones_are_not():
    for pause_s, expected in ((1.0, True), (100.0, False)):
        budget = StepBudget(FULL)
        for number in range(MOST_OFFENDERS):
            small = failed({f"r{number}": 1}, f"r{number}", is_alone=True)
            budget.fail(small, number * pause_s)
            decision = budget.fail(small, number * pause_s)
        assert decision.gives_up is expected


def test_any_order_of_events_keeps_the_budget_between_one_and_full():
    chance = random.Random(3)
    budget = StepBudget(FULL)
    now_s = 0.0
    for _ in range(3000):
        now_s += chance.random() * 5
        names = [f"r{chance.randrange(12)}" for _ in range(chance.randrange(1, 9))]
        tokens = {name: chance.choice([1, 1, 40]) for name in names}
        if chance.random() < 0.3:
            step = failed(tokens, *names[: chance.randrange(3)], tried=chance.randrange(1, 9))
            total = step.total_tokens
            before = budget.current_tokens
            decision = budget.fail(step, now_s)
            if decision.offender is None and budget.current_tokens < before:
                assert budget.current_tokens < total or total == 1
        else:
            budget.succeed(sum(tokens.values()), names)
        budget.grow(now_s)
        assert 1 <= budget.current_tokens <= FULL
