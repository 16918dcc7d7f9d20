"""Incidents as they are found: repeats folded, wrappers tied to their cause, unlike failures kept apart."""

from __future__ import annotations

import pytest

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Evidence, Location
from oomguard.rules.signature import Signature, Wording
from oomguard.scan.context import Context
from oomguard.scan.incidents import (
    FOLD_LINES,
    MAX_ALSO_IN,
    MAX_INCIDENTS,
    ScannedIncident,
    ScannedIncidents,
)
from oomguard.scan.pattern_search import Hit

RANK, SIBLING, CORE = "Worker_TP0 pid=1", "Worker_TP1 pid=2", "EngineCore_DP0 pid=3"


class Log:
    """Incidents taken one after the other, in one start unless told otherwise."""

    def __init__(self) -> None:
        self.found, self.context = ScannedIncidents(), Context(1)

    def take(
        self,
        line: int,
        process: str | None = None,
        kind: str = "cuda_oom",
        *,
        wraps: tuple[str, ...] = (),
        phase: str = "unknown",
        **facts: object,
    ) -> ScannedIncident | None:
        wording = Wording("anchor", None, "a test")
        signature = Signature("x.toml", kind, "torch", phase, (wording,), (), (), wraps)
        told = {name: Fact(name, value, "printed") for name, value in facts.items()}
        hit = Hit(signature, wording, 0, 0, 1, "message", told, 0)
        return self.found.take(
            hit, Location(line, 0, process), Evidence(f"line {line}", line), self.context
        )

    def take_facts(self, line: int, *facts: Fact) -> ScannedIncident | None:
        """Take a failure whose figures are rounded each in its way."""
        wording = Wording("anchor", None, "a test")
        signature = Signature("x.toml", "cuda_oom", "torch", "unknown", (wording,), (), (), ())
        hit = Hit(signature, wording, 0, 0, 1, "message", {fact.name: fact for fact in facts}, 0)
        return self.found.take(
            hit, Location(line, 0, None), Evidence(f"line {line}", line), self.context
        )

    @property
    def incidents(self):
        return [found.incident for found in self.found.all]


@pytest.fixture
def log() -> Log:
    return Log()


def test_failure_keeps_its_place_facts_and_start(log):
    log.take(7, RANK, tried_bytes=GIB)
    (incident,) = log.incidents

    assert (incident.location.line, incident.location.process, incident.start) == (7, RANK, 1)
    assert incident.facts["tried_bytes"].line == 7
    assert log.context.failed


def test_the_same_figures_again_are_a_repeat_however_far_behind(log):
    log.take(1, RANK, tried_bytes=GIB)

    assert log.take(100_000, RANK, tried_bytes=GIB) is None
    assert log.incidents[0].repeated == 2


@pytest.mark.parametrize(("line", "incidents"), [(1 + FOLD_LINES, 1), (2 + FOLD_LINES, 2)])
def test_a_message_that_says_less_is_a_repeat_where_it_is_close(log, line, incidents):
    log.take(1, RANK, tried_bytes=GIB, device_free_bytes=GIB)
    log.take(line, CORE, tried_bytes=GIB)

    assert len(log.incidents) == incidents


def test_a_message_that_says_more_gives_its_figures_to_the_first(log):
    log.take(1, CORE)
    log.take(2, CORE, tried_bytes=GIB)

    assert len(log.incidents) == 1
    assert log.incidents[0].facts["tried_bytes"].value == GIB
    assert log.incidents[0].location.line == 1


def test_other_figures_in_the_same_process_are_another_failure(log):
    log.take(1, RANK, tried_bytes=GIB)
    log.take(2, RANK, tried_bytes=2 * GIB)

    assert [incident.repeated for incident in log.incidents] == [1, 1]


def test_ranks_that_fail_together_keep_the_figures_of_the_first(log):
    log.take(1, RANK, tried_bytes=GIB)
    log.take(2, SIBLING, tried_bytes=2 * GIB, device_free_bytes=GIB)
    (incident,) = log.incidents

    assert (incident.repeated, incident.also_in) == (2, (SIBLING,))
    assert incident.facts["tried_bytes"].value == GIB
    assert "device_free_bytes" not in incident.facts


def test_ranks_that_fail_far_from_each_other_are_two_failures(log):
    log.take(1, RANK, tried_bytes=GIB)
    log.take(2 + FOLD_LINES, SIBLING, tried_bytes=2 * GIB)

    assert len(log.incidents) == 2


def test_process_is_named_once_among_repeats_of_a_failure(log):
    for line in range(1, 5):
        log.take(line, RANK if line == 1 else SIBLING, tried_bytes=GIB)

    assert log.incidents[0].also_in == (SIBLING,)
    assert log.incidents[0].repeated == 4


def test_the_processes_named_are_bounded(log):
    for number in range(3 * MAX_ALSO_IN):
        log.take(number, f"Worker_TP{number} pid={number}", tried_bytes=GIB)

    assert len(log.incidents[0].also_in) == MAX_ALSO_IN
    assert log.incidents[0].repeated == 3 * MAX_ALSO_IN


def test_another_kind_is_another_failure(log):
    log.take(1, RANK, "cuda_oom")
    log.take(2, RANK, "kv_cache_none_left")

    assert [incident.kind for incident in log.incidents] == ["cuda_oom", "kv_cache_none_left"]


def test_outer_message_names_the_kind_inner_keeps_figures(log):
    log.take(1, RANK, tried_bytes=GIB)
    log.take(
        4,
        CORE,
        "sampler_warmup_oom",
        wraps=("cuda_oom",),
        phase="sampling_logits",
        max_num_seqs=256,
        tried_bytes=5 * GIB,
    )
    (incident,) = log.incidents

    assert (incident.kind, incident.phase, incident.location.line) == (
        "sampler_warmup_oom",
        "sampling_logits",
        1,
    )
    assert incident.facts["tried_bytes"].value == GIB
    assert incident.facts["max_num_seqs"].value == 256
    assert [line.line for line in incident.evidence] == [1, 4]


def test_both_messages_again_are_a_repeat_of_the_wrapped_one(log):
    for line in (1, 3):
        log.take(line, RANK, tried_bytes=GIB)
        log.take(line + 1, RANK, "sampler_warmup_oom", wraps=("cuda_oom",), max_num_seqs=256)

    assert [incident.kind for incident in log.incidents] == ["sampler_warmup_oom"]


@pytest.mark.parametrize(("line", "process"), [(2 + FOLD_LINES, RANK), (2, SIBLING)])
def test_distant_or_siblings_message_is_a_separate_failure(log, line, process):
    log.take(1, RANK)
    log.take(line, process, "sampler_warmup_oom", wraps=("cuda_oom",))

    assert len(log.incidents) == 2


def test_a_dead_engine_is_tied_to_the_failure_before_it(log):
    log.take(1, RANK)

    assert log.take(2, "APIServer pid=9", "engine_dead") is None
    assert [line.line for line in log.incidents[0].wrappers] == [2]


def test_a_dead_engine_alone_is_kept_and_the_next_failure_too(log):
    log.take(1, None, "engine_dead")
    log.take(2, RANK)

    assert [incident.kind for incident in log.incidents] == ["engine_dead", "cuda_oom"]


def test_wrappers_of_one_failure_are_bounded_and_unique(log):
    log.take(1, RANK)
    for line in [2, *range(2, 100)]:
        log.take(line, None, "engine_dead")

    assert len(log.incidents[0].wrappers) == 20
    assert len(set(log.incidents[0].wrappers)) == 20


def test_nothing_is_folded_into_another_start(log):
    log.take(1, RANK, tried_bytes=GIB)
    log.context = log.context.next()
    log.take(2, RANK, tried_bytes=GIB)
    log.take(3, None, "engine_dead")

    assert [incident.start for incident in log.incidents] == [1, 2]
    assert [len(incident.wrappers) for incident in log.incidents] == [0, 1]


def test_the_number_of_incidents_is_bounded(log):
    for number in range(MAX_INCIDENTS + 10):
        log.take(1000 * number, f"process {number}", tried_bytes=number)

    assert len(log.incidents) == MAX_INCIDENTS


def test_figures_of_another_wording_of_the_message_are_added(log):
    found = log.take(1, RANK, tried_bytes=GIB)
    signature = Signature("x.toml", "cuda_oom", "torch", "unknown", (), ())
    told = {
        "tried_bytes": Fact("tried_bytes", 9, "printed"),
        "device_free_bytes": Fact("device_free_bytes", 5, "printed"),
    }
    found.say_more(Hit(signature, Wording("a", None, "a test"), 0, 0, 1, "", told, 0))

    assert {name: fact.value for name, fact in found.incident.facts.items()} == {
        "tried_bytes": GIB,
        "device_free_bytes": 5,
    }
    assert found.incident.facts["device_free_bytes"].line == 1


def test_exact_figure_replaces_the_rounded_one_it_agrees_with():
    log = Log()
    rounded = Fact("tried_bytes", 150994944, slack=5243)
    log.take_facts(1, rounded)
    log.take_facts(2, Fact("tried_bytes", 150995968))
    log.take_facts(3, Fact("tried_bytes", 150990000, slack=10**6))

    (only,) = log.incidents
    assert only.facts["tried_bytes"].value == 150995968


def test_figures_beyond_their_rounding_are_two_failures():
    log = Log()
    log.take_facts(1, Fact("tried_bytes", 150994944, slack=5243))
    log.take_facts(2, Fact("tried_bytes", 151995968))

    assert len(log.incidents) == 2
