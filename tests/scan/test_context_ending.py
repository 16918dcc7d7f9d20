"""How an engine ended: what the log says first counts, and a start that came to serve forgets the one before."""

from __future__ import annotations

import pytest

from oomguard.core.incident import Evidence, Incident
from oomguard.diagnosis import default_rules
from oomguard.scan.context import EngineEnd
from oomguard.scan.scan import Scanner
from oomguard.scan.source import Line

STARTED = "(EngineCore pid={}) INFO 11-22 04:20:47 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='./m', dtype=torch.float16, max_seq_len=8192"
SERVES = "(EngineCore pid={}) INFO 11-22 04:21:20 [kv_cache_utils.py:2327] GPU KV cache size: 97,648 tokens"
FATAL = (
    "(EngineCore pid={}) ERROR 11-22 04:21:38 [core.py:1512] EngineCore encountered a fatal error."
)


def death(*told: str) -> Incident | None:
    ending = EngineEnd()
    for number, what in enumerate(told, 1):
        ending.note(what, Evidence(f"line of {what}", number), "EngineCore pid=2", "vllm")
    return ending.of(1)


def scanned(*log: str) -> Scanner:
    scanner = Scanner(default_rules())
    for number, text in enumerate(log, 1):
        scanner.push(Line(number, 0, text))
    return scanner


def death_in(*log: str) -> Incident | None:
    return scanned(*log).death()


@pytest.mark.parametrize(
    "told",
    [
        (),
        ("failing",),
        ("failing", "stopping"),
        ("stopping", "gone"),
        ("stopping", "died"),
        ("told", "died"),
        ("gone", "told"),
        ("told", "failing", "died"),
    ],
)
def test_a_stop_is_no_death(told):
    assert death(*told) is None


@pytest.mark.parametrize(
    "told",
    [
        ("died", "stopping"),
        ("died", "told"),
        ("failing", "stopping", "died"),
        ("gone", "stopping"),
        ("gone", "died", "told"),
    ],
)
def test_what_is_cleaned_up_after_a_death_does_not_unsay_it(told):
    assert death(*told) is not None


def test_the_engines_own_word_is_quoted_before_its_fronts():
    assert death("gone", "died").message == "line of died"
    assert death("died", "gone").message == "line of died"


def test_a_death_says_whose_it_is_and_where():
    found = death_in(STARTED.format(2), SERVES.format(2), FATAL.format(2))
    assert (found.kind, found.framework, found.location.line, found.location.process) == (
        "engine_dead",
        "vllm",
        3,
        "EngineCore pid=2",
    )


def test_a_later_start_that_serves_forgets_a_death():
    first = (STARTED.format(2), SERVES.format(2), FATAL.format(2))
    assert death_in(*first, STARTED.format(9), SERVES.format(9)) is None


def test_a_later_start_that_never_served_does_not():
    first = (STARTED.format(2), SERVES.format(2), FATAL.format(2))
    assert death_in(*first, STARTED.format(9)).start == 1


def test_the_last_of_several_deaths_counts():
    log = [line.format(pid) for pid in (2, 9) for line in (STARTED, SERVES, FATAL)]
    assert death_in(*log).start == 2


def test_error_only_output_may_hide_another_engine():
    assert death_in(FATAL.format(2)) is None


def test_a_prompt_that_quotes_a_death_is_none():
    prompt = "(APIServer pid=1) INFO 11-22 04:21:38 [logger.py:41] Received request cmpl-1: prompt: 'EngineCore encountered a fatal error.'"
    assert death_in(STARTED.format(2), SERVES.format(2), prompt) is None


TOLD = "(APIServer pid=7) INFO 11-22 04:22:25 [launcher.py:254] [shutdown] API server: shutdown triggered"
LOST = "(APIServer pid=7) ERROR 11-22 04:22:25 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."


def kinds(*log: str) -> list[str]:
    return [incident.kind for incident in scanned(*log).diagnosis().incidents]


def test_stopped_front_without_its_engine_has_no_failure():
    """vLLM's front may lose the race with the engine that it has just ended."""
    assert kinds(STARTED.format(2), SERVES.format(2), TOLD, LOST) == []


@pytest.mark.parametrize(
    "log",
    [
        (LOST,),
        (LOST, TOLD),
        (FATAL.format(2), TOLD, LOST),
        (TOLD, STARTED.format(3), SERVES.format(3), LOST),
    ],
)
def test_engine_gone_before_a_stop_request_is_a_failure(log):
    assert kinds(STARTED.format(2), SERVES.format(2), *log) == ["engine_dead"]
