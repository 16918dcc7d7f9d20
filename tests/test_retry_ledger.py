"""The ledger of attempts: nothing that failed is chosen again, and the policy's attempts are all there are."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.incident import Diagnosis, Effect, Incident, Patch
from oomguard.remedy.policy import Policy
from oomguard.retry import Ledger
from oomguard.rules.rule_files import RuleSet
from support.each import each

NAMES = ("batch_size", "max_model_len", "max_num_seqs", "enforce_eager")
NO_RULES = RuleSet((), ())


def patch(name="batch_size", new=4, *, old=8, blocked=None, group=None):
    return Patch(
        name, old, new, Effect.OUTPUT_PRESERVING, "it fits", blocked_by=blocked, group=group
    )


def failure(*plan, kind="cuda_oom"):
    return Incident(kind, "out of memory", plan=plan)


patches = st.builds(
    patch,
    st.sampled_from(NAMES),
    st.none() | st.integers(1, 4),
    blocked=st.sampled_from([None, None, None, "pinned"]),
    group=st.sampled_from([None, None, 1, 2]),
)
plans = st.lists(patches, max_size=5, unique_by=lambda p: p.setting)
policies = st.builds(Policy, max_attempts=st.integers(1, 7))


def carried(names):
    return lambda name: name in names


def play(ledger, plans, carries, stop_after=None):
    """Fail once with each plan; return what was chosen after each attempt, and the patches and settings of each."""
    chosen, begun = [], []
    for number in ledger.rounds():
        begun.append((ledger.patches, dict(ledger.settings)))
        incident = failure(*plans[number - 1]) if number <= len(plans) else None
        if incident is not None:
            ledger.diagnose(Diagnosis("", (incident,)), NO_RULES)
        ledger.end(incident, error="" if incident is None else "OutOfMemoryError")
        if stop_after == number:
            ledger.stop()
        chosen.append(() if incident is None else ledger.choose(incident, carries))
    return chosen, begun


runs = given(
    policy=policies,
    plans=st.lists(plans, min_size=1, max_size=10),
    carries=st.sets(st.sampled_from(NAMES)).map(carried),
    stop_after=st.none() | st.integers(1, 6),
)


@runs
def test_nothing_that_failed_is_chosen_again(policy, plans, carries, stop_after):
    ledger = Ledger(policy)
    play(ledger, plans, carries, stop_after)
    failed = set()
    for attempt in ledger.attempts:
        assert not {(p.setting, p.new) for p in attempt.patches} & failed
        if attempt.incident is not None:
            failed |= set(attempt.settings.items())


@runs
def test_attempts_are_numbered_and_have_the_chosen_patches(policy, plans, carries, stop_after):
    ledger = Ledger(policy)
    chosen, begun = play(ledger, plans, carries, stop_after)
    assert [attempt.number for attempt in ledger.attempts] == list(
        range(1, len(ledger.attempts) + 1)
    )
    assert [attempt.patches for attempt in ledger.attempts] == [(), *chosen[:-1]]
    assert [patches for patches, _ in begun] == [attempt.patches for attempt in ledger.attempts]
    assert not chosen[-1]


@runs
def test_attempt_settings_are_all_changes_so_far(policy, plans, carries, stop_after):
    ledger = Ledger(policy, {"batch_size": 8})
    _, begun = play(ledger, plans, carries, stop_after)
    settings = {"batch_size": 8}
    for attempt, (patches, in_force) in zip(ledger.attempts, begun, strict=True):
        settings |= {p.setting: p.new for p in patches}
        assert attempt.settings == in_force == settings


@runs
def test_only_what_is_permitted_solved_and_carried_is_chosen(policy, plans, carries, stop_after):
    ledger = Ledger(policy)
    chosen, _ = play(ledger, plans, carries, stop_after)
    assert all(p.applicable and carries(p.setting) for patches in chosen for p in patches)


@runs
def test_the_relaunches_of_the_policy_are_all_there_are(policy, plans, carries, stop_after):
    ledger = Ledger(policy)
    play(ledger, plans, carries, stop_after)
    assert len(ledger.attempts) <= policy.max_attempts


@runs
def test_after_a_stop_nothing_is_chosen(policy, plans, carries, stop_after):
    ledger = Ledger(policy)
    chosen, _ = play(ledger, plans, carries, stop_after)
    assert stop_after is None or not any(chosen[stop_after - 1 :])
    assert stop_after is None or len(ledger.attempts) <= stop_after


def test_a_chosen_change_names_what_permitted_it():
    reduced = replace(patch(), effect=Effect.REDUCES_CAPACITY)
    for policy, change, permitted_by in [
        (Policy(), patch(), "default"),
        (Policy(), reduced, "default: you did not set it"),
        (Policy(allow=Effect.REDUCES_CAPACITY), reduced, "--allow reduces-capacity"),
    ]:
        ledger = Ledger(policy)
        chosen, _ = play(ledger, [[change]], carried(NAMES))
        assert [p.permitted_by for p in chosen[0]] == [permitted_by]


def test_a_stop_drops_what_was_chosen():
    ledger, begun = Ledger(Policy()), []
    for number in ledger.rounds():
        begun.append(number)
        ledger.end(failure(patch()))
        assert ledger.choose(failure(patch()), carried(NAMES))
        ledger.stop()
    assert begun == [1]


def test_it_says_when_patches_were_left_and_attempts_were_not():
    ledger = Ledger(Policy(max_attempts=2))
    play(ledger, [[patch(new=4)], [patch(new=2)]], carried(NAMES))
    assert ledger.exhausted
    ledger = Ledger(Policy(max_attempts=2))
    play(ledger, [[patch(new=4)], []], carried(NAMES))
    assert not ledger.exhausted


def test_after_the_deadline_nothing_is_chosen():
    ledger = Ledger(Policy(deadline_s=0.0))
    chosen, _ = play(ledger, [[patch()]], carried(NAMES))
    assert chosen == [()]
    assert ledger.exhausted


def test_a_deadline_that_passes_after_the_choice_holds_too(monkeypatch):
    ledger = Ledger(Policy(deadline_s=60.0))
    numbers = []
    for number in ledger.rounds():
        numbers.append(number)
        ledger.end(failure(patch()))
        assert ledger.choose(failure(patch()), carried(NAMES))
        monkeypatch.setattr(ledger, "policy", replace(ledger.policy, deadline_s=0.0))
    assert numbers == [1]
    assert ledger.exhausted


def test_a_group_is_chosen_whole_or_not_at_all():
    together = [patch("max_model_len", 1, group=1), patch("max_num_seqs", 2, group=1)]
    alone = patch("batch_size", 3)
    ledger = Ledger(Policy())
    assert ledger.choose(failure(*together, alone), carried(NAMES)) == tuple(together)
    assert ledger.choose(failure(*together, alone), carried({"max_model_len", "batch_size"})) == (
        alone,
    )
    ledger.tried.add(("max_num_seqs", 2))
    assert ledger.choose(failure(*together, alone), carried(NAMES)) == (alone,)


def test_what_an_attempt_failed_with_may_be_said():
    """A part of fewer rows than the size in force has failed: the size itself may still be right."""
    ledger = Ledger(Policy(), {"batch_size": 8})
    ledger.diagnose(Diagnosis("", (failure(),)), NO_RULES, failed_with={"batch_size": 5})
    assert ledger.tried == {("batch_size", 5)}


@each("kind", ["memory_profiling_changed", "engine_dead"])
def test_what_is_no_memory_failure_is_not_remedied(kind):
    assert Ledger(Policy()).choose(failure(patch(), kind=kind), carried(NAMES)) == ()


def test_token_budget_below_one_image_is_raised_without_an_oom():
    raised = patch()
    assert Ledger(Policy()).choose(failure(raised, kind="encoder_budget"), carried(NAMES)) == (
        raised,
    )


def test_the_last_diagnosis_that_found_anything_is_kept():
    ledger = Ledger(Policy())
    found = ledger.diagnose(Diagnosis("", (failure(),)), NO_RULES)
    ledger.diagnose(Diagnosis(""), NO_RULES)
    assert ledger.diagnosis is found


def test_a_run_that_succeeds_at_once_makes_one_attempt():
    ledger = Ledger(Policy())
    for _ in ledger.rounds():
        ledger.end()
    assert [attempt.succeeded for attempt in ledger.attempts] == [True]


def test_attempt_that_failed_later_keeps_its_number():
    ledger = Ledger(Policy(max_attempts=2))
    rounds = ledger.rounds()
    next(rounds)
    ledger.end()
    ran = ledger.reopen(anew=False)
    failed = ledger.end(failure(patch()), error="EngineDeadError")

    assert (ran.number, failed.number, len(ledger.attempts)) == (1, 1, 1)
    assert ledger.choose(failed.incident, carried(NAMES)) == (patch(),)


def test_relaunches_restart_counting_after_a_useful_attempt():
    ledger = Ledger(Policy(max_attempts=2))
    for _, _ in zip(range(2), ledger.rounds(), strict=False):
        ledger.end(failure(patch()), error="EngineDeadError")
        ledger.choose(failure(patch()), carried(NAMES))

    assert ledger.exhausted
    ledger.reopen(anew=False)
    ledger.end(failure(patch(new=2)), error="EngineDeadError")
    assert ledger.choose(failure(patch(new=2)), carried(NAMES)) == ()
    ledger.reopen(anew=True)
    ledger.end(failure(patch(new=2)), error="EngineDeadError")
    assert ledger.choose(failure(patch(new=2)), carried(NAMES)) == (patch(new=2),)
