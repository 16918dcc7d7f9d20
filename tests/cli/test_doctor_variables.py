"""oomguard's own variables, on environments of each kind."""

from __future__ import annotations

from oomguard.cli.doctor import variable_checks


def test_oomguard_turned_off_is_a_problem(monkeypatch):
    known = frozenset()
    for value, status in (("1", "problem"), ("0", "ok")):
        monkeypatch.setenv("OOMGUARD_DISABLE", value)
        (check,) = variable_checks({"OOMGUARD_DISABLE": value}, known)
        assert check.status == status


def test_overrides_that_are_no_json_object_are_a_problem():
    known = frozenset()

    for value, status in (('{"max_model_len": 1}', "ok"), ("{", "problem"), ("[1]", "problem")):
        (check,) = variable_checks({"OOMGUARD_VLLM_OVERRIDES": value}, known)
        assert check.status == status
