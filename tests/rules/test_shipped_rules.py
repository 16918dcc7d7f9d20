"""The rule files that come with oomguard."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import cache

from oomguard.core.incident import CAUSES, KINDS, PHASES
from oomguard.core.settings import SETTINGS
from oomguard.diagnosis import problems
from oomguard.remedy.from_log import SOLVERS
from oomguard.rules.rule_files import RuleSet, load_rules, shipped_root

FILES = sorted(shipped_root().rglob("*.toml"))


@cache
def shipped() -> RuleSet:
    return load_rules(check=True)


def test_loading_shipped_rules_compiles_no_pattern():
    code = (
        "import sys; from oomguard.rules import rule_files as load, syntax; load.load_rules();"
        " print('regex' in sys.modules, syntax._compiled.cache_info().currsize)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False 0\n"


def test_there_are_shipped_rule_files():
    assert len(FILES) > 10


def test_no_file_has_problems():
    found = problems(shipped())

    assert not found, "\n".join(found)


def test_every_file_is_loaded_as_a_rule_or_a_signature():
    loaded = [rule.path for rule in shipped().rules] + [
        signature.path for signature in shipped().signatures
    ]

    assert sorted(loaded) == [
        str(path)
        for path in FILES
        if path.name not in {"quotations.toml", "missing.toml", "actions.toml"}
    ]
    assert shipped().missing
    assert shipped().actions.situations


def test_codes_are_unique():
    assert [
        code for code, count in Counter(rule.code for rule in shipped().rules).items() if count > 1
    ] == []


def test_rules_name_only_known_causes_kinds_settings_and_solvers():
    for rule in shipped().rules:
        assert rule.cause in CAUSES, rule.path
        assert rule.kinds, rule.path
        assert set(rule.kinds) <= set(KINDS), rule.path
        assert {fix.setting for fix in rule.fixes} <= set(SETTINGS), rule.path
        assert {fix.solve for fix in rule.fixes if fix.solve} <= set(SOLVERS), rule.path


def test_signatures_name_a_known_kind_and_phase():
    for signature in shipped().signatures:
        assert signature.kind is None or signature.kind in KINDS, signature.path
        assert signature.phase in PHASES, signature.path


def test_rules_come_in_the_order_of_their_codes():
    codes = [rule.code for rule in shipped().rules]

    assert codes == sorted(codes)


def test_problems_reports_a_rule_without_a_negative_test():
    rules = shipped()
    rule = rules.rules[0]
    positive = tuple(test for test in rule.tests if not test.get("expect_no_match"))
    stripped = rule._replace(tests=positive)

    found = problems(RuleSet(rules.signatures, (stripped,)))

    assert any("no negative" in text for text in found)


def test_every_kind_of_the_contract_has_a_wording():
    signatures = shipped().signatures
    told = {s.kind for s in signatures} | {w.kind for s in signatures for w in s.wordings}
    told |= {kind for s in signatures for kind in s.becomes.values()}

    assert set(KINDS) <= told


def test_every_cause_of_the_contract_has_a_rule():
    assert {rule.cause for rule in shipped().rules} >= set(CAUSES)
