"""Looks at a server, one after the other, and what is made of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.cluster.health import (
    CORE_GONE_S,
    Counters,
    EngineProblem,
    EngineProcesses,
    HealthSample,
    ProgressMonitor,
)

LIMIT_S, EVERY_S = 60.0, 3.0
CORE = EngineProcesses(cores=(7,))


def look(
    at_s: float, tokens: float = 0, *, running: float = 1, waits_s: float = 0, **more: object
) -> HealthSample:
    engines = {"0": Counters(running, progress={"tokens": tokens, "kv": more.pop("kv", 0)})}
    given = {
        "engines": engines,
        "waits_s": (waits_s,) if waits_s else (),
        "processes": CORE,
        **more,
    }
    return HealthSample(at_s, at_s, **given)


def found(*looks: HealthSample) -> EngineProblem | None:
    progress = ProgressMonitor(LIMIT_S, EVERY_S)
    return [progress.see(one) for one in looks][-1]


def every(seconds: float, **more: object) -> list[HealthSample]:
    """Looks over so many seconds at an engine that has work and does not move."""
    return [look(at_s, waits_s=at_s, **more) for at_s in range(0, int(seconds) + 1, int(EVERY_S))]


def test_request_without_progress_is_a_hang_after_the_limit():
    assert found(*every(LIMIT_S - EVERY_S)) is None
    finding = found(*every(LIMIT_S))
    assert finding is not None
    assert finding.is_counted
    assert not finding.is_sure
    assert "1 requests in a step, but no counter moved for 60 s" in finding.what


def test_stuck_before_the_first_step_shows_in_a_waiting_request():
    finding = found(*every(LIMIT_S, running=0))
    assert finding is not None
    assert not finding.is_counted
    assert "a request has waited for 60 s and no counter moved for 60 s" in finding.what


def test_a_long_prompt_moves_the_kv_cache_and_is_no_hang():
    looks = [look(at_s, waits_s=at_s, kv=at_s // 30) for at_s in range(0, 600, 3)]
    assert found(*looks) is None


def test_an_idle_engine_is_no_hang_however_long():
    assert found(*[look(at_s, running=0) for at_s in range(0, 900, 3)]) is None


def test_an_engine_that_sleeps_takes_no_step_and_is_no_hang():
    engines = {"0": Counters(1.0, sleeps=True, progress={"tokens": 1})}
    assert found(*[look(at_s, waits_s=at_s, engines=engines) for at_s in range(0, 900, 3)]) is None


def test_one_stuck_rank_next_to_a_working_one_is_found():
    def both(at_s: float) -> dict[str, Counters]:
        return {"0": Counters(1.0, progress={"t": at_s}), "1": Counters(2.0, progress={"t": 5})}

    finding = found(*[look(at_s, engines=both(at_s)) for at_s in range(0, 61, 3)])
    assert finding is not None
    assert "2 requests of engine 1" in finding.what
    assert not finding.may_be_asked


def test_a_stopped_core_is_found_without_any_request():
    stopped = EngineProcesses(cores=(7,), stopped=(7,))
    finding = found(*[look(at_s, running=0, processes=stopped) for at_s in range(0, 61, 3)])
    assert finding is not None
    assert finding.is_sure
    assert "a signal stopped its engine core 7 60 s ago" in finding.what


def test_a_core_that_is_gone_is_a_death_soon():
    looks = [
        look(0, running=0),
        *[look(at_s, running=0, processes=EngineProcesses()) for at_s in range(3, 37, 3)],
    ]
    assert found(*looks[: int(CORE_GONE_S // 3)]) is None
    finding = found(*looks)
    assert finding is not None
    assert finding.is_dead
    assert finding.is_sure


def test_a_version_without_titles_has_no_core_to_lose():
    assert (
        found(*[look(at_s, running=0, processes=EngineProcesses()) for at_s in range(0, 900, 3)])
        is None
    )


def test_a_server_that_answers_nothing_is_a_hang():
    finding = found(*[look(at_s, engines=None) for at_s in range(0, 61, 3)])
    assert finding is not None
    assert "the server has not answered for 60 s" in finding.what


def test_waiting_request_counts_only_while_processes_are_idle():
    idle = [look(at_s, waits_s=at_s, engines={}) for at_s in range(0, 61, 3)]
    finding = found(*idle)
    assert finding is not None
    assert not finding.has_counters
    assert "the server has no counters; its processes have been idle for 60 s" in finding.what
    busy = [
        look(
            at_s, waits_s=at_s, engines={}, processes=EngineProcesses(cores=(7,), cpu_s=at_s * 0.9)
        )
        for at_s in range(0, 300, 3)
    ]
    assert found(*busy) is None


def test_core_gone_before_the_first_look_counts_as_dead():
    looks = [look(at_s, processes=EngineProcesses()) for at_s in range(0, int(CORE_GONE_S) + 1, 3)]
    progress = ProgressMonitor(LIMIT_S, EVERY_S, had_cores=True)
    assert [progress.see(one) for one in looks][-1].is_dead
    assert found(*looks) is None  # an engine that gives its processes no titles


def test_what_was_not_seen_is_no_quiet_time():
    """The machine slept, or somebody stopped oomguard."""
    looks = [look(0), look(3), look(3000, waits_s=3000), look(3003, waits_s=3003)]
    assert found(*looks) is None


def test_a_server_that_its_user_stopped_is_no_hang():
    assert found(*[look(at_s, engines=None, is_paused=True) for at_s in range(0, 900, 3)]) is None


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 3), st.floats(0, 900)), min_size=1, max_size=80
    ),
    st.data(),
)
def test_no_engine_that_moves_within_the_limit_is_ever_found(steps, data):
    """Whatever runs and waits: where a counter moves at least once in every limit, and its core lives, nothing is said."""
    progress, tokens, still_s = ProgressMonitor(LIMIT_S, EVERY_S), 0, 0.0
    for number, (moves, running, wait_s) in enumerate(steps):
        still_s += EVERY_S
        if moves or still_s >= LIMIT_S:
            tokens, still_s = tokens + 1, 0.0
        finding = progress.see(look(number * EVERY_S, tokens, running=running, waits_s=wait_s))
        assert finding is None
