"""Which failure of a start is one of memory: the last words of what died decide, and silence is asked for its traces."""

from __future__ import annotations

from oomguard.engines.protocol import StartResult
from oomguard.guarding.engine_start import scan_start
from oomguard.scan.exceptions import exception_lines
from oomguard.scan.source import Line

CORE = "(EngineCore pid=7) ERROR 11-22 18:00:00 [core.py:1510] "
NO_ROOM = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free."
PASSED_ON = RuntimeError(
    "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
)
KILLED = RuntimeError(
    "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}"
)
WORKER = "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause."


def lines(*texts: str) -> tuple[Line, ...]:
    return tuple(Line(number, 0, text) for number, text in enumerate(texts, 1))


def kinds(
    error: Exception,
    *said: str,
    last: tuple[str, ...] = (),
    printed: str = "",
    killed: bool = False,
) -> list[str]:
    behind = [line.text for line in exception_lines(error)]
    ended = StartResult(None, error, lines(*said, *behind), lines(*last), printed, killed)
    return [incident.kind for incident in scan_start(ended, "start", {}).incidents]


def test_the_cause_is_what_the_core_said_last():
    assert kinds(PASSED_ON, CORE + NO_ROOM, last=(CORE + NO_ROOM,)) == ["kv_cache_none_left"]


def test_handled_memory_failure_is_not_the_cause():
    other = CORE + "ValueError: no such tokenizer"
    assert kinds(PASSED_ON, CORE + OOM, other, last=(other,)) == []


def test_error_of_the_starting_process_is_not_the_engines():
    assert kinds(ValueError("no such model"), CORE + OOM) == []
    assert kinds(KeyError("CUDA out of memory"), CORE + OOM) == []


def test_failed_workers_words_count_next_to_the_cores():
    worker = "(Worker pid=8) ERROR 11-22 18:00:00 [multiproc_executor.py:900] " + OOM
    assert kinds(PASSED_ON, worker, CORE + WORKER, last=(worker, CORE + WORKER)) == ["cuda_oom"]


def test_killed_process_ran_out_of_memory_if_the_kernel_says_so(subtests):
    for killed, expected in [(True, ["host_oom"]), (False, ["engine_dead"])]:
        with subtests.test(killed=killed, expected=expected):
            assert kinds(KILLED, CORE + "INFO loading", killed=killed) == expected


def test_what_a_silent_process_printed_is_its_cause():
    assert kinds(PASSED_ON, printed=OOM) == ["cuda_oom"]
    assert kinds(PASSED_ON, last=(CORE + WORKER,), printed=OOM) == ["cuda_oom"]


def test_an_engine_in_this_process_fails_with_its_own_error():
    assert kinds(ValueError(NO_ROOM.partition(": ")[2])) == ["kv_cache_none_left"]


class EngineDeadError(Exception):
    """As vLLM's 0.32, which is no RuntimeError."""


def test_engine_death_at_work_has_the_known_cause_of_its_core(subtests):
    for killed, expected in [(True, "host_oom"), (False, "engine_dead")]:
        with subtests.test(killed=killed, expected=expected):
            error = EngineDeadError(
                "EngineCore encountered an issue. See stack trace (above) for the root cause."
            )
            assert kinds(error, killed=killed) == [expected]
            assert kinds(error, CORE + OOM, last=(CORE + OOM,)) == ["cuda_oom"]
