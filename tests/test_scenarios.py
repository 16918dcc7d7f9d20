"""Whole logs of jobs with many processes: each failure once, with its own process, its own start and its own figures."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oomguard.scan.anchors as skim_module
from oomguard.core.facts import GIB
from oomguard.core.incident import Diagnosis, Incident
from oomguard.diagnosis import diagnose, diagnose_stream
from support.each import each

NONE_LEFT = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
TOO_LONG = (
    "ValueError: To serve at least one request with the model's max seq len (40960), (5.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (3.25 GiB). Based on the available memory, the estimated "
    "maximum model length is 26624. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
    "initializing the engine."
)
DEAD = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}"
RESTARTS = 50


def allocator(tried_gib: float = 2, free_mib: int = 512, gpu: int = 0) -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried_gib:.2f} GiB. GPU {gpu} has a total capacity "
        f"of 23.69 GiB of which {free_mib}.00 MiB is free. Including non-PyTorch memory, this process has 23.10 GiB memory "
        "in use. Of the allocated memory 22.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but "
        "unallocated."
    )


def api(text: str, pid: int = 70) -> str:
    return f"(APIServer pid={pid}) {text}"


def core(text: str, pid: int = 71, replica: int = 0) -> str:
    return f"(EngineCore_DP{replica} pid={pid}) {text}"


def rank(index: int, text: str) -> str:
    return f"(Worker_TP{index} pid={100 + index}) {text}"


def info(text: str) -> str:
    return f"INFO 03-04 10:00:05 [gpu_worker.py:298] {text}"


def error(text: str) -> str:
    return f"ERROR 03-04 10:00:07 [core.py:708] {text}"


def begin(
    number: int = 1, *, weights_gib: float = 15, available_gib: float | None = -1
) -> list[str]:
    """The lines of one start, up to its failure."""
    pid = 10 * number
    lines = [
        api(f"INFO 03-04 10:00:00 [api_server.py:1043] vLLM API server version 0.{number}.0", pid),
        api(
            f"INFO 03-04 10:00:00 [utils.py:233] non-default args: {{'model': 'm', 'max_model_len': {number}024}}",
            pid,
        ),
        core(info(f"Initializing a V1 LLM engine (v0.{number}.0) with config: model='m'"), pid + 1),
        core(info("Starting to load model m..."), pid + 1),
        core(info(f"Model loading took {weights_gib:.2f} GiB and 3.00 seconds"), pid + 1),
    ]
    return lines + (
        []
        if available_gib is None
        else [core(info(f"Available KV cache memory: {available_gib:.2f} GiB"), pid + 1)]
    )


def fail(number: int = 1, *, wrapper: bool = True) -> list[str]:
    """The lines of one start's failure."""
    pid = 10 * number
    lines = [core(error("EngineCore failed to start."), pid + 1), core(error(NONE_LEFT), pid + 1)]
    return lines + (
        [api("Traceback (most recent call last):", pid), api(DEAD, pid)] if wrapper else []
    )


def work(number: int, lines: int = 30) -> list[str]:
    """Lines of an API server that goes on."""
    return [
        api(f"INFO 03-04 10:00:09 [launcher.py:{i}] Route: /v{i}", 10 * number)
        for i in range(1, lines + 1)
    ]


def look(*log: str) -> Diagnosis:
    return diagnose_stream(io.BytesIO("\n".join(log).encode()), "a.log")


def only(diagnosis: Diagnosis) -> Incident:
    (incident,) = diagnosis.incidents
    return incident


def value(incident: Incident, name: str) -> object:
    return incident.facts[name].value if name in incident.facts else None


# One failure, many processes


def test_ranks_that_fail_together_are_one_named_incident():
    log = [rank(i, error(allocator(gpu=i, free_mib=500 + i))) for i in range(4)]
    incident = only(
        look(
            *log,
            core(
                error("RuntimeError: Worker failed with error, please check the stack trace above")
            ),
            api(DEAD),
        )
    )

    assert incident.kind == "cuda_oom"
    assert incident.location.process == "Worker_TP0 pid=100"
    assert incident.also_in == ("Worker_TP1 pid=101", "Worker_TP2 pid=102", "Worker_TP3 pid=103")
    assert incident.repeated == 4
    assert value(incident, "device_free_bytes") == 500 << 20
    assert [line.line for line in incident.wrappers] == [6]


def test_lines_of_ranks_that_print_in_turn_are_told_apart():
    frames = [
        "Traceback (most recent call last):",
        '  File "gpu_worker.py", line 1, in load_model',
        "    self.load()",
    ]
    log = [rank(i, error(frame)) for frame in frames for i in range(4)]
    log += [rank(i, error(allocator(tried_gib=1 + i))) for i in (2, 0, 3, 1)]
    incident = only(look(*log))

    assert incident.location.process == "Worker_TP2 pid=102"
    assert value(incident, "tried_bytes") == 3 * GIB
    assert incident.repeated == 4
    assert incident.phase == "load_weights"


def test_wrapped_message_is_joined_while_another_rank_prints():
    words = allocator().split(". ")
    log = [line for part in words for line in (rank(0, part + "."), rank(1, info("still healthy")))]
    incident = only(look(*log))

    assert incident.location.process == "Worker_TP0 pid=100"
    assert value(incident, "device_total_bytes") == round(23.69 * GIB)
    assert value(incident, "reserved_unallocated_bytes") == 100 << 20


def test_ray_workers_that_repeat_a_failure_are_folded():
    head = "(RayWorkerWrapper pid={pid}, ip=10.0.0.{pid}) "
    log = [head.format(pid=pid) + error(allocator()) for pid in (4, 5)]
    log.append(head.format(pid=5) + error(allocator()) + " [repeated 6x across cluster]")
    incident = only(look("\x1b[36m" + log[0] + "\x1b[0m", *log[1:]))

    assert incident.location.process == "RayWorkerWrapper pid=4"
    assert incident.also_in == ("RayWorkerWrapper pid=5",)
    assert incident.repeated == 3


def test_the_same_failure_told_by_rank_core_and_server_is_one():
    log = [
        rank(0, error(allocator())),
        core(error("Exception: " + allocator())),
        api(allocator()),
        api(DEAD),
    ]
    incident = only(look(*log))

    assert incident.location.process == "Worker_TP0 pid=100"
    assert incident.repeated == 3


def test_failure_printed_first_stays_first():
    quick = [api(f"INFO 03-04 10:00:09 [x.py:{i}] line") for i in range(30)]
    diagnosis = look(core(error(NONE_LEFT)), api(allocator()), *quick)

    assert [incident.location.line for incident in diagnosis.incidents] == [1, 2]
    assert diagnosis.first_cause.kind == "kv_cache_none_left"


def test_two_failures_of_one_process_are_two_incidents():
    diagnosis = look(core(error(NONE_LEFT)), core(error("retrying")), core(error(TOO_LONG)))

    assert [incident.kind for incident in diagnosis.incidents] == [
        "kv_cache_none_left",
        "kv_cache_too_small_for_max_len",
    ]


def test_two_allocations_of_other_sizes_are_two_incidents():
    diagnosis = look(
        core(error(allocator(2))), core(error("request aborted")), core(error(allocator(3)))
    )

    assert [value(incident, "tried_bytes") for incident in diagnosis.incidents] == [
        2 * GIB,
        3 * GIB,
    ]


def test_hundreds_of_failing_processes_are_one_incident():
    diagnosis = look(*(f"(RayWorkerWrapper pid={pid}) {allocator()}" for pid in range(500)))

    assert only(diagnosis).repeated == 500
    assert len(only(diagnosis).also_in) <= 100


# Healthy siblings


def test_figures_of_a_healthy_data_parallel_sibling_stay_with_it():
    log = [
        core(info("Model loading took 15.00 GiB and 1.00 seconds"), 71, 0),
        core(info("Model loading took 3.00 GiB and 1.00 seconds"), 72, 1),
        core(info("Available KV cache memory: 7.00 GiB"), 72, 1),
        core(error(NONE_LEFT), 71, 0),
    ]
    incident = only(look(*log))

    assert value(incident, "model_weights_bytes") == 15 * GIB
    assert value(incident, "kv_cache_available_bytes") is None
    assert all("3.00 GiB" not in line.text for line in incident.evidence)


def test_figures_of_another_data_parallel_engine_stay_with_it():
    log = [
        "(Worker_DP0_TP0 pid=1) " + info("Model loading took 15.00 GiB and 1.00 seconds"),
        "(Worker_DP1_TP0 pid=2) " + info("Model loading took 3.00 GiB and 1.00 seconds"),
        "(Worker_DP1_TP0 pid=2) " + info("Available KV cache memory: 7.00 GiB"),
        core(error(NONE_LEFT), 71, 0),
    ]
    incident = only(look(*log))

    assert value(incident, "model_weights_bytes") == 15 * GIB
    assert value(incident, "kv_cache_available_bytes") is None


def test_frames_of_a_healthy_rank_do_not_give_the_phase():
    log = [rank(1, '  File "x.py", line 1, in _dummy_sampler_run'), rank(0, error(allocator()))]

    assert only(look(*log)).phase != "sampling_logits"


def test_both_data_parallel_engines_fail_with_own_figures():
    log = [
        core(info("Model loading took 15.00 GiB and 1.00 seconds"), 71, 0),
        core(info("Model loading took 16.00 GiB and 1.00 seconds"), 72, 1),
        core(error(NONE_LEFT), 72, 1),
        core(error(NONE_LEFT), 71, 0),
    ]
    incident = only(look(*log))

    assert incident.location.process == "EngineCore_DP1 pid=72"
    assert incident.also_in == ("EngineCore_DP0 pid=71",)
    assert value(incident, "model_weights_bytes") == 16 * GIB


# Wrappers


def test_the_wrappers_of_all_parents_are_tied_to_the_cause():
    log = [
        rank(0, error(allocator())),
        core(
            error(
                "Exception: WorkerProc initialization failed due to an exception in a background process."
            )
        ),
        api("Traceback"),
        api(DEAD),
    ]
    incident = only(look(*log))

    assert incident.kind == "cuda_oom"
    assert [line.line for line in incident.wrappers] == [2, 4]


def test_a_wrapper_before_its_cause_is_no_incident_beside_it():
    assert only(look(api(DEAD), core(error(NONE_LEFT)))).kind == "kv_cache_none_left"


def test_warm_up_error_has_all_figures_of_its_allocation():
    log = [
        core(error(allocator())),
        core(error("")),
        core(error("The above exception was the direct cause of the following exception:")),
        core(
            error(
                "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests."
            )
        ),
    ]
    incident = only(look(*log))

    assert incident.kind == "sampler_warmup_oom"
    assert incident.phase == "sampling_logits"
    assert incident.location.line == 1
    assert value(incident, "max_num_seqs") == 256
    assert value(incident, "tried_bytes") == 2 * GIB
    assert value(incident, "reserved_unallocated_bytes") == 100 << 20


# Phases


def test_allocation_after_the_capture_notice_is_the_capture():
    incident = only(
        look(
            core(info("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)")),
            core(error(allocator())),
        )
    )

    assert (incident.kind, incident.phase) == ("cudagraph_capture_oom", "cudagraph_capture")


def test_allocation_after_a_finished_capture_is_not_the_capture():
    log = [
        core(info("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)")),
        core(info("Graph capturing finished in 5 secs, took 0.75 GiB")),
        core(error(allocator())),
    ]
    incident = only(look(*log))

    assert (incident.kind, incident.phase) == ("cuda_oom", "decode")
    assert value(incident, "cudagraph_bytes") == 0.75 * GIB


def test_the_capture_of_another_start_gives_no_phase():
    log = [
        *begin(1),
        core(info("Capturing CUDA graphs (PIECEWISE)"), 11),
        core(error(allocator()), 11),
        api(DEAD, 10),
    ]
    first, second = look(
        *log, *begin(2, available_gib=None), core(error(allocator(3)), 21)
    ).incidents

    assert first.kind == "cudagraph_capture_oom"
    assert (second.kind, second.start) == ("cuda_oom", 2)


# Restarts in one file


def test_two_failed_starts_keep_their_own_figures():
    first, second = look(
        *begin(1), *fail(1), *begin(2, weights_gib=16, available_gib=-2), *fail(2)
    ).incidents

    assert [first.start, second.start] == [1, 2]
    assert [value(one, "model_weights_bytes") for one in (first, second)] == [15 * GIB, 16 * GIB]
    assert [value(one, "kv_cache_available_bytes") for one in (first, second)] == [-GIB, -2 * GIB]
    assert [value(one, "max_model_len_tokens") for one in (first, second)] == [1024, 2024]
    assert [one.framework_version for one in (first, second)] == ["0.1.0", "0.2.0"]
    assert [len(one.wrappers) for one in (first, second)] == [1, 1]


def test_first_starts_measurements_are_unknown_to_the_second():
    second = look(*begin(1), *fail(1), *begin(2, available_gib=None)[:3], *fail(2)).incidents[1]

    assert second.start == 2
    assert "model_weights_bytes" not in second.facts
    assert "kv_cache_available_bytes" not in second.facts


@each("wrapper", [True, False])
@each("lines", [0, 3, 30])
def test_a_healthy_start_after_a_failure_changes_nothing_of_it(lines, wrapper):
    healthy = begin(2, weights_gib=16, available_gib=4)
    log = [
        *begin(1),
        *fail(1, wrapper=wrapper),
        *healthy[:2],
        *work(2, lines),
        *healthy[2:],
        *work(2, lines),
    ]
    diagnosis = look(*log)
    incident = only(diagnosis)

    assert incident.start == 1
    assert value(incident, "model_weights_bytes") == 15 * GIB
    assert value(incident, "max_model_len_tokens") == 1024
    assert incident.framework_version == "0.1.0"
    assert [start.number for start in diagnosis.starts] == [1, 2]
    assert [start.facts["model_weights_bytes"].value for start in diagnosis.starts] == [
        15 * GIB,
        16 * GIB,
    ]
    assert len(incident.wrappers) == wrapper


@each("lines", [0, 30])
def test_start_without_figures_borrows_none_from_a_healthy_one(lines):
    log = [*begin(1, available_gib=4), *work(1, lines), *begin(2, available_gib=None)[:3], *fail(2)]
    incident = only(look(*log))

    assert incident.start == 2
    assert "model_weights_bytes" not in incident.facts


def test_fifty_restarts_are_fifty_incidents_with_their_starts():
    log = [line for number in range(1, RESTARTS + 1) for line in (*begin(number), *fail(number))]
    incidents = look(*log).incidents

    assert [incident.start for incident in incidents] == list(range(1, RESTARTS + 1))
    assert {incident.kind for incident in incidents} == {"kv_cache_none_left"}
    assert [len(incident.wrappers) for incident in incidents] == [1] * RESTARTS


# Collectors


def docker(line: str) -> str:
    return json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-01-01T00:00:00.1Z"})


COLLECTORS: dict[str, Callable[[str], str]] = {
    "docker": docker,
    "cri": "2026-01-01T00:00:00.123456789Z stderr F {}".format,
    "kubectl --timestamps": "2026-01-01T00:00:00.123456789Z {}".format,
    "kubectl --prefix": "[pod/vllm-7d9c8b-x/vllm] {}".format,
    "kubectl, both": "[pod/vllm-7d9c8b-x/vllm] 2026-01-01T00:00:00.123456789Z {}".format,
    "journald": "Jan 01 00:00:00 node-1 vllm[123]: {}".format,
    "journald, full dates": "2026-01-01T00:00:00+0000 node-1 vllm[123]: {}".format,
    "journald, json": lambda line: json.dumps({"MESSAGE": line, "PRIORITY": "3", "_PID": "12"}),
    "slurm": "0: {}".format,
    "compose": "vllm-1  | {}".format,
    "swarm": "vllm.1.abc123@node1    | {}".format,
    "actions": "2026-01-01T00:00:00.1234567Z {}".format,
    "logging": "2026-01-01 00:00:00,123 - engine - ERROR - {}".format,
    "loguru": "2026-01-01 00:00:00.123 | ERROR    | run:main:12 - {}".format,
    "cloud": lambda line: json.dumps(
        {"textPayload": line, "timestamp": "2026", "severity": "ERROR"}
    ),
    "structured": lambda line: json.dumps({"event": line, "level": "error", "timestamp": "2026"}),
    "quotation": "> {}".format,
}

OLD_START = (
    "INFO 01-01 00:00:00 llm_engine.py:70] Initializing an LLM engine with config: model='m', dtype=torch.float16, "
    "max_seq_len=4096, tensor_parallel_size=2"
)
FAILURES: dict[str, list[str]] = {
    "server": [*begin(1), *fail(1)],
    "ranks": [rank(i, error(allocator(gpu=i))) for i in range(2)] + [api(DEAD)],
    "bare": [
        "loading",
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in load_model',
        allocator(),
    ],
    "old": [OLD_START, NONE_LEFT],
    "host": [
        "working",
        "[12.3] Out of memory: Killed process 7 (python3) total-vm:1000kB, anon-rss:900kB",
    ],
}


def without_rank(process: str | None) -> str | None:
    """Return a process without the rank that srun's label says; it is all that a collector adds (tests/scan/test_incidents_rank_labels.py)."""
    return process and (process.removeprefix("rank 0").removeprefix(": ") or None)


def told(diagnosis: Diagnosis) -> list[object]:
    return [
        (
            one.kind,
            one.phase,
            one.framework,
            one.message,
            one.location.line,
            without_rank(one.location.process),
            one.repeated,
            one.also_in,
            len(one.wrappers),
            {name: fact.value for name, fact in one.facts.items()},
            [cause.id for cause in one.causes],
        )
        for one in diagnosis.incidents
    ]


@each("collector", COLLECTORS)
@each("failure", FAILURES)
def test_each_collector_changes_nothing_of_each_failure(failure, collector):
    wrapped = [COLLECTORS[collector](line) for line in FAILURES[failure]]

    assert told(look(*wrapped)) == told(look(*FAILURES[failure]))


# Long logs


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(FAILURES)), st.integers(0, 120)), min_size=1, max_size=4
    ),
    st.sampled_from([3000, 5000, 1 << 16]),
)
def test_long_log_reads_like_a_short_one_at_any_block_size(parts, block_bytes):
    healthy = "INFO 03-04 10:00:09 [loggers.py:123] Avg prompt throughput: 100.0 tokens/s"
    log = [line for failure, gap in parts for line in [*FAILURES[failure], *[healthy] * (30 + gap)]]
    data = "\n".join(log).encode()
    plain = diagnose_stream(io.BytesIO(data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skim_module, "SHORT_BYTES", 1)
        patch.setattr(skim_module, "BLOCK_BYTES", block_bytes)
        skimmed = diagnose_stream(io.BytesIO(data))

    assert told(skimmed) == told(plain)
    assert [one.location for one in skimmed.incidents] == [one.location for one in plain.incidents]
    for one in plain.incidents:
        assert data[one.location.byte :].split(b"\n")[0] == data.split(b"\n")[one.location.line - 1]


def test_a_text_and_a_file_number_their_lines_alike(tmp_path: Path):
    text = "form\x0cfeed\u2028and\x85others\n 10%\r 20%\r\nwindows\r\n" + allocator()
    (tmp_path / "a.log").write_bytes(text.encode())

    assert only(diagnose(text)).location.line == only(diagnose(tmp_path / "a.log")).location.line
