"""``oomguard.diff``: two starts in, what changed out; a source may be a path, a text or a diagnosis."""

from __future__ import annotations

import pytest

import oomguard


def test_a_path_a_text_and_a_diagnosis_are_compared_alike(vllm, tmp_path):
    old, new = vllm(version="0.12.0"), vllm(version="0.13.0", fails=True)
    (tmp_path / "new.log").write_text(new)

    of_texts = oomguard.diff(old, new)

    assert isinstance(of_texts, oomguard.Comparison)
    assert of_texts.headline.startswith("0.12.0 -> 0.13.0")
    for source in (tmp_path / "new.log", str(tmp_path / "new.log"), oomguard.diagnose(new)):
        assert oomguard.diff(oomguard.diagnose(old), source).headline == of_texts.headline


def test_a_start_is_chosen_by_its_number(vllm):
    two = vllm(version="0.12.0") + "INFO [launcher.py:1] waiting\n" * 20 + vllm(version="0.13.0")
    assert not oomguard.diff(two, two).differs
    assert oomguard.diff(two, two, old_start=1).headline.startswith("0.12.0 -> 0.13.0")


def test_the_policy_rules_the_plan_of_the_failed_start(vllm):
    worked, failed = vllm(pool="4.75"), vllm(fails=True, pool="3.25")
    pinned = oomguard.Policy(pinned=frozenset({"max_model_len"}))
    free, held = oomguard.diff(worked, failed), oomguard.diff(worked, failed, policy=pinned)
    blocked = [
        {p.setting: p.blocked_by for p in c.new.incident.plan}["max_model_len"]
        for c in (free, held)
    ]
    assert blocked[0] != blocked[1]
    assert "pinned" in blocked[1]


def test_a_path_that_is_nowhere_is_told_from_a_text(vllm):
    with pytest.raises(oomguard.InputError, match=r"nowhere\.log: No such file or directory"):
        oomguard.diff(vllm(), "nowhere.log")


def test_what_is_no_log_is_refused_and_says_what_was_expected(subtests, vllm):
    for source in [5, None, b"log", []]:
        with subtests.test(source=source):
            with pytest.raises(oomguard.UsageError, match="diff expects a log, not") as error:
                oomguard.diff(source, vllm())
            assert "oomguard.diagnose" in error.value.hint
