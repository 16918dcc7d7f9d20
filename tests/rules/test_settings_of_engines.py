"""What any rule proposes exists in the engine that failed, and does something under the settings in force."""

from __future__ import annotations

import itertools
from functools import cache

from oomguard.core.incident import Incident
from oomguard.core.settings import engines, is_foreign
from oomguard.diagnosis import assess, incident_from
from oomguard.remedy.policy import make_policy
from oomguard.rules.rule_files import Rule, RuleSet, load_rules

# The share still decides there whether the engine begins at all.
AT_THE_BEGINNING = {
    "startup_free_memory_below_utilization",
    "cpu_node_memory",
    "memory_profiling_changed",
}


@cache
def shipped() -> RuleSet:
    return load_rules()


def assessed(rule: Rule, **more: object) -> list[Incident]:
    """The incidents of a rule's own tests, with more facts, explained by all rules."""
    found = []
    for test in rule.tests:
        for kind in rule.kinds if not test.get("expect_no_match") else [test["kind"]]:
            incident = incident_from(kind, {**test.get("facts", {}), **more})
            found.append(assess(incident, shipped(), make_policy("changes-outputs")))
    return found


def proposed(incident: Incident) -> set[str]:
    return {patch.setting for patch in incident.plan} | {
        other.setting for other in incident.alternatives
    }


def test_every_proposed_setting_belongs_to_the_failed_engine():
    for engine, rule in itertools.product(engines(), shipped().rules):
        for incident in assessed(rule, framework=engine):
            foreign = {name for name in proposed(incident) if is_foreign(name, engine)}
            assert not foreign, (engine, rule.code, incident.kind, foreign)


def test_a_byte_count_or_a_number_of_blocks_silences_the_share():
    for rule, given in itertools.product(
        shipped().rules, [{"kv_cache_memory_bytes": 1 << 30}, {"num_gpu_blocks_override": 8}]
    ):
        for incident in assessed(rule, framework="vllm", **given):
            if incident.kind in AT_THE_BEGINNING:
                continue
            assert "gpu_memory_utilization" not in proposed(incident), (rule.code, given)
            if incident.kind.startswith("kv_cache_"):
                blamed = {
                    cause.rule for cause in incident.causes if cause.id.startswith("utilization_")
                }
                assert not blamed, (rule.code, given, incident.kind)


def test_setting_of_one_engine_and_shared_variable_are_known():
    assert is_foreign("mem_fraction_static", "vllm")
    assert is_foreign("gpu_memory_utilization", "sglang")
    assert not is_foreign("mem_fraction_static", "sglang")
    assert not is_foreign("allocator_options", "vllm")
    assert not is_foreign("gpu_memory_utilization", "an engine that nobody knows")
