"""What lines that are no failure say: kept by process and by start, told to the processes that they speak of."""

from __future__ import annotations

import pytest

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Evidence
from oomguard.diagnosis import diagnose
from oomguard.rules.signature import Signature, Wording
from oomguard.scan.context import (
    NEAR_AFTER_LINES,
    NEAR_BEFORE_LINES,
    Context,
    Near,
    nearest_phase,
    related,
    role,
)
from oomguard.scan.pattern_search import Hit

CORE, RANK, SIBLING = "EngineCore_DP0 pid=1", "Worker_TP0 pid=2", "Worker_TP1 pid=3"


def say(
    context: Context,
    process: str | None,
    line: int,
    *,
    near: bool = False,
    starts: bool = False,
    phase: str | None = None,
    framework: str = "vllm",
    **facts: object,
) -> Near | None:
    wording = Wording("anchor", None, "a test", phase=phase, near=near, starts=starts)
    signature = Signature("x.toml", None, framework, "unknown", (wording,), ())
    told = {name: Fact(name, value, "printed") for name, value in facts.items()}
    return context.note(
        Hit(signature, wording, 0, 0, 1, "", told, 0), process, Evidence(f"line {line}", line)
    )


def known(context: Context, process: str | None) -> dict[str, object]:
    return {name: fact.value for name, fact in context.facts_for(process).items()}


@pytest.mark.parametrize(
    ("process", "name"),
    [
        ("Worker_TP3 pid=2", "Worker"),
        ("rank0", "rank"),
        ("DP0 TP1", "DP"),
        ("1,0", None),
        (None, None),
        ("", None),
    ],
)
def test_a_role_is_what_a_process_is_called_without_its_number(process, name):
    assert role(process) == name


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (None, CORE, True),
        (CORE, CORE, True),
        (CORE, RANK, True),
        (RANK, SIBLING, False),
        ("EngineCore_DP0 pid=1", "EngineCore_DP1 pid=2", False),
        ("EngineCore_DP0 pid=1", "Worker_DP0_TP1 pid=2", True),
        ("EngineCore_DP0 pid=1", "Worker_DP1_TP1 pid=2", False),
        ("EngineCore_DP1 pid=1", "APIServer pid=2", True),
        ("EngineCore_DP1 pid=1", "EngineCore_DP10 pid=2", False),
        ("DP0 TP0", "DP1 TP0", False),
        ("rank0", "rank1", False),
        ("1,0", "1,1", False),
    ],
)
def test_processes_report_on_each_other_unless_of_one_kind(one, other, expected):
    assert related(one, other) is expected
    assert related(other, one) is expected


def test_own_words_of_a_process_come_first_and_loose_text_last():
    context = Context(1)
    say(
        context,
        None,
        1,
        model_weights_bytes=1 * GIB,
        kv_cache_available_bytes=1 * GIB,
        cudagraph_bytes=1 * GIB,
    )
    say(context, CORE, 2, model_weights_bytes=2 * GIB)
    say(context, RANK, 3, model_weights_bytes=3 * GIB, cudagraph_bytes=3 * GIB)

    assert known(context, CORE) == {
        "model_weights_bytes": 2 * GIB,
        "kv_cache_available_bytes": 1 * GIB,
        "cudagraph_bytes": 3 * GIB,
    }


def test_siblings_measurements_stay_but_settings_do_not():
    context = Context(1)
    say(context, SIBLING, 1, model_weights_bytes=3 * GIB, max_model_len_tokens=4096)

    assert known(context, RANK) == {"max_model_len_tokens": 4096}


def test_a_fact_keeps_the_line_that_it_was_read_from():
    context = Context(1)
    say(context, RANK, 7, model_weights_bytes=GIB, max_model_len_tokens=4096)

    assert context.facts_for(RANK)["model_weights_bytes"].line == 7
    assert context.evidence_for(RANK, "model_weights_bytes").line == 7
    assert context.evidence_for(SIBLING, "model_weights_bytes") is None
    assert context.evidence_for(SIBLING, "max_model_len_tokens").line == 7


def test_text_after_a_failure_fills_only_open_facts():
    context = Context(1)
    say(context, CORE, 1, model_weights_bytes=GIB)
    context.failed = True
    say(context, CORE, 3, model_weights_bytes=2 * GIB, cudagraph_bytes=GIB)
    say(context, CORE, 4, cudagraph_bytes=3 * GIB)

    assert {name: fact.value for name, fact in context.later_for(CORE).items()} == {
        "model_weights_bytes": 2 * GIB,
        "cudagraph_bytes": GIB,
    }


def test_phase_is_that_of_the_last_line_in_any_order():
    context = Context(1)
    say(context, CORE, 9, phase="kv_cache_init")
    say(context, CORE, 2, phase="load_weights")

    assert context.phase_for(CORE) == "kv_cache_init"
    assert context.phase_for(RANK) == "kv_cache_init"
    assert Context(1).phase_for(CORE) is None


def test_ranks_go_through_a_start_together_and_engines_do_not():
    context = Context(1)
    say(context, SIBLING, 1, phase="kv_cache_init")
    say(context, "EngineCore_DP1 pid=9", 2, phase="decode")

    assert context.phase_for(RANK) == "decode"
    only_engines = Context(1)
    say(only_engines, "EngineCore_DP1 pid=9", 2, phase="decode")
    assert only_engines.phase_for(CORE) is None


def test_frame_refers_only_to_the_failure_next_to_it():
    context = Context(1)
    near = say(context, RANK, 5, near=True, phase="profile_run", tried_bytes=GIB)

    assert near.of(RANK)
    assert near.of(None)
    assert not near.of(SIBLING)
    assert known(context, RANK) == {}
    assert context.phase_for(RANK) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (1000 - NEAR_BEFORE_LINES, True),
        (1000 - NEAR_BEFORE_LINES - 1, False),
        (1002 + NEAR_AFTER_LINES, True),
        (1003 + NEAR_AFTER_LINES, False),
    ],
)
def test_frames_stand_before_their_message_or_just_behind_it(line, expected):
    context = Context(1)
    say(context, RANK, line, near=True)

    assert bool(context.near_frames(1000, 1002, RANK, 0)) is expected


def test_frames_of_the_failure_before_are_not_of_this_one():
    context = Context(1)
    say(context, RANK, 5, near=True)

    assert context.near_frames(10, 10, RANK, since=5) == []


def test_next_start_keeps_decisions_but_no_measurements():
    context = Context(1)
    say(context, None, 1, model="m", model_weights_bytes=GIB)
    say(context, RANK, 2, model_weights_bytes=GIB, phase="kv_cache_init")
    following = context.next()

    assert following.number == 2
    assert known(following, RANK) == {"model": "m"}
    assert following.phase_for(RANK) is None
    assert not following.failed
    assert following.settings == {}


def test_settings_are_complete_where_an_echo_was_read_to_its_end():
    context = Context(1)
    context.note_echo("non-default args: {'model': 'm', 'max_model_len': 8")
    assert not context.settings_complete

    context.note_echo("non-default args: {'model': 'm', 'max_model_len': 8192}")
    assert context.settings_complete
    assert context.settings["max_model_len"].value == 8192


@pytest.mark.parametrize(
    ("process", "framework"), [(CORE, "vllm"), ("TP0", "sglang"), (None, "sglang")]
)
def test_hosting_engine_is_known_by_its_role_or_lines(process, framework):
    context = Context(1)
    say(context, None, 1, framework="torch")
    say(context, None, 2, framework="sglang")

    assert context.framework_for(process) == framework


def test_the_most_telling_frame_gives_the_phase():
    frame = Near(1, None, {}, "generate", None, Evidence("", 1))

    assert (
        nearest_phase([frame, frame._replace(phase="prompt_logprobs"), frame._replace(phase=None)])
        == "prompt_logprobs"
    )
    assert nearest_phase([]) is None


@pytest.mark.parametrize(
    ("frame", "phase"), [("in _initialize_kv_caches", "profile_run"), ("in step_fn", "generate")]
)
def test_code_generation_frame_at_start_is_not_a_requests(frame, phase):
    log = (
        f'  File "/opt/vllm/v1/engine/core.py", line 231, {frame}\n'
        "    return model.generate(choices)\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 11.90 GiB of "
        "which 20.00 MiB is free.\n"
    )

    assert diagnose(log).incidents[0].phase == phase
