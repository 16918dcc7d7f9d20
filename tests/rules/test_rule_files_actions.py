"""The table of actions: every failure gets one, in the table's order, and none that makes it worse."""

from __future__ import annotations

import itertools

import pytest

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import (
    CAUSES,
    KINDS,
    NOT_OOM_KINDS,
    PHASES,
    Cause,
    Effect,
    Incident,
    Patch,
)
from oomguard.core.settings import engines
from oomguard.core.text import PLACEHOLDER
from oomguard.diagnosis import assess, default_rules
from oomguard.engines.registry import launchers  # noqa: F401 - registers the engines' settings
from oomguard.remedy.actions import with_actions
from oomguard.remedy.policy import Policy
from oomguard.rules.rule_files import ActionTable, load_rules

FRAMEWORKS = (*engines(), "torch", "any", "unknown", "host", "ray", "jax")


def of(
    kind: str, cause: str = "unknown", framework: str = "unknown", phase: str = "unknown", **values
) -> Incident:
    """A failure with one cause and these facts."""
    facts = {name: Fact(name, value) for name, value in values.items()}
    causes = (Cause(cause, "", 0.9, (), "text"),)
    return Incident(kind, "text", framework=framework, phase=phase, facts=facts, causes=causes)


def actions(incident: Incident) -> list[str]:
    return [
        f"{a.id} {a.direction or ''}".strip()
        for a in with_actions(incident, default_rules().actions).actions
    ]


def test_the_shipped_table_has_no_mistake():
    assert load_rules(check=True).actions.situations


def test_every_failure_and_every_dead_engine_has_an_action():
    wanted = [kind for kind in KINDS if kind not in NOT_OOM_KINDS or kind == "engine_dead"]
    for kind, cause, framework in itertools.product(wanted, CAUSES, FRAMEWORKS):
        assert actions(of(kind, cause, framework)), (kind, cause, framework)
    for kind, framework, phase in itertools.product(wanted, FRAMEWORKS, PHASES):
        assert actions(of(kind, "unknown", framework, phase)), (kind, framework, phase)


def test_every_action_says_what_to_do_and_why_and_has_no_hole():
    for kind, cause, framework in itertools.product(
        KINDS, CAUSES, ("vllm", "sglang", "torch", "llama.cpp")
    ):
        for action in with_actions(of(kind, cause, framework), default_rules().actions).actions:
            assert action.why, (kind, cause, framework, action.id)
            for text in (action.title, action.why, action.command or ""):
                assert "unknown" not in text, (kind, cause, framework, text)
                assert not PLACEHOLDER.search(text), (kind, cause, framework, text)


@pytest.mark.parametrize("kind", ["kv_cache_none_left", "kv_cache_too_small_for_max_len"])
def test_a_share_is_never_lowered_when_the_kv_cache_lacks_memory(kind):
    for cause in CAUSES:
        assert "gpu_memory_utilization down" not in actions(
            of(kind, cause, "vllm", "kv_cache_init")
        )


def test_a_share_is_never_raised_when_the_device_itself_was_full():
    for cause in CAUSES:
        assert "gpu_memory_utilization up" not in actions(of("cuda_oom", cause, "vllm", "decode"))


def test_allocator_option_is_not_offered_for_absent_memory():
    planned = Patch(
        "allocator_options", None, "expandable_segments:True", Effect.OUTPUT_PRESERVING, "pieces"
    )
    for ratio, offered in ((0.01, False), (0.4, True)):
        incident = of("cuda_oom", unused_ratio=ratio, unused_bytes=GIB)
        found = with_actions(
            Incident(**{**_fields(incident), "plan": (planned,)}), default_rules().actions
        )

        assert ("allocator_options" in {action.id for action in found.actions}) is offered
        assert ("allocator_options" in {patch.setting for patch in found.plan}) is offered


def test_the_allocator_option_follows_the_guard_if_little_is_in_pieces():
    planned = Patch(
        "allocator_options", None, "expandable_segments:True", Effect.OUTPUT_PRESERVING, "pieces"
    )
    for ratio, first in ((0.08, "wrap_in_guard"), (0.3, "allocator_options")):
        incident = of("cuda_oom", "fragmentation", "torch", unused_ratio=ratio, unused_bytes=GIB)
        found = with_actions(
            Incident(**{**_fields(incident), "plan": (planned,)}), default_rules().actions
        )

        names = [action.id for action in found.actions]
        assert names[0] == first
        assert {"wrap_in_guard", "allocator_options"} <= set(names)


def test_the_limit_of_images_is_spelled_by_version():
    spelled = {
        "0.7.2": "image=1,video=0",
        "0.8.5": """'{"image": 1, "video": 0}'""",
        "0.21.0": """'{"image": 1, "video": 0}'""",
        None: """'{"image": 1, "video": 0}' # before vLLM 0.8.5: image=1,video=0""",
    }
    for version, value in spelled.items():
        incident = of("cuda_oom", "multimodal_profile", "vllm", "profile_run")
        versioned = Incident(**{**_fields(incident), "framework_version": version})
        found = with_actions(versioned, default_rules().actions)
        command = next(a.command for a in found.actions if a.id == "limit_mm_per_prompt")
        assert command == f"--limit-mm-per-prompt {value}"


def _fields(incident: Incident) -> dict:
    return {name: getattr(incident, name) for name in Incident.__dataclass_fields__}


def test_another_process_comes_before_a_lower_share():
    found = actions(
        of("startup_free_memory_below_utilization", "colocated_process", "vllm", "load_weights")
    )

    assert found[:2] == ["end_other_process", "use_another_device"]


def test_the_plan_is_part_of_the_actions_with_the_same_values():
    incident = assess(
        of(
            "kv_cache_too_small_for_max_len",
            framework="vllm",
            max_model_len_tokens=32768,
            estimated_max_model_len_tokens=20000,
            kv_cache_needed_bytes=4 * GIB,
            kv_cache_available_bytes=3 * GIB,
        ),
        default_rules(),
        Policy(),
    )
    offered = {action.id: action.new for action in incident.actions}

    assert incident.plan
    assert all(offered[patch.setting] == patch.new for patch in incident.plan)


def test_an_engine_gets_no_setting_that_it_does_not_have():
    assert not {"gpu_memory_utilization down", "max_num_seqs down"} & set(
        actions(of("cuda_oom", framework="torch"))
    )
    assert "mem_fraction_static down" not in actions(
        of("cuda_oom", framework="vllm", phase="decode")
    )


def test_without_a_table_the_plan_alone_gives_the_actions():
    patch = Patch("max_model_len", 4096, 2048, Effect.REDUCES_CAPACITY, "2048 tokens fit")
    (action,) = with_actions(Incident("cuda_oom", "text", plan=(patch,)), ActionTable()).actions

    assert (action.id, action.direction, action.old, action.new) == (
        "max_model_len",
        "down",
        4096,
        2048,
    )
    assert action.title == "Lower max_model_len from 4096 to 2048"
    assert action.applicability == "automatic"


def test_a_setting_that_another_one_overrules_is_not_offered():
    for fixed, offered in ((False, True), (True, False)):
        incident = of(
            "kv_cache_too_small_for_max_len",
            "max_model_len_too_large",
            "vllm",
            kv_cache_is_fixed=fixed,
        )

        assert ("gpu_memory_utilization up" in actions(incident)) is offered


def test_python_commands_name_their_imports():
    commands = [text for row in default_rules().actions.wordings for text in row.commands]
    guarded = [text for text in commands if "oomguard.guard" in text]
    quantized = [text for text in commands if "BitsAndBytesConfig(" in text]
    assert guarded
    assert quantized
    assert [text for text in guarded if "import oomguard" not in text] == []
    for text in quantized:
        assert "import BitsAndBytesConfig" in text
        assert "pip install bitsandbytes" in text
