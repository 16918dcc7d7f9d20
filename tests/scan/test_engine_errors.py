"""An engine that died of something else: the exception or the signal of its own process is the cause, never its parent's report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from oomguard.diagnosis import default_rules, diagnose
from oomguard.scan.anchors import BLOCK_BYTES, SHORT_BYTES
from oomguard.scan.engine_errors import passes_on
from oomguard.scan.scan import Scanner
from oomguard.scan.source import Line

CORE, WORKER = (
    "(EngineCore_DP0 pid=31) ERROR 07-09 10:00:00 [core.py:708] ",
    "(Worker_TP{} pid=4{}) ERROR 07-09 10:00:00 [multiproc_executor.py:790] ",
)
FRONT = "(APIServer pid=30) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
HEAD, TRACEBACK = "EngineCore failed to start.", "Traceback (most recent call last):"
FRAME = '  File "/opt/acme/vllm/v1/worker/gpu_worker.py", line 41, in load_model'
DIRECT = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
MISSING = "AttributeError: 'AcmeConfig' object has no attribute 'num_widgets'"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of 23.55 GiB of which 310.00 MiB is free."


def block(prefix, *texts):
    return [prefix + text for text in texts]


def one(*log):
    (incident,) = diagnose("\n".join(log)).incidents
    return incident


def error(incident):
    facts = incident.facts
    return facts["engine_error"].value, facts["engine_error_line"].value


def cause(incident):
    return incident.kind, incident.causes[0].id


def test_an_attribute_that_is_missing_is_quoted_with_its_line():
    log = [*block(CORE, HEAD, TRACEBACK, FRAME, "    self.n = config.num_widgets", MISSING), FRONT]
    incident = one(*log)
    assert cause(incident) == ("engine_dead", "not_memory")
    assert error(incident) == (MISSING, 5)
    assert incident.headline == f"The engine died: {MISSING}"
    assert MISSING in incident.causes[0].explanation
    assert "line 5" in incident.causes[0].explanation
    assert any(log[4] == line.text for line in incident.causes[0].evidence)


def test_a_kernel_image_that_triton_cannot_load_is_quoted():
    text = "RuntimeError: Triton Error [CUDA]: device kernel image is invalid"
    incident = one(*block(CORE, HEAD, TRACEBACK, FRAME, text), FRONT)
    assert (cause(incident), error(incident)) == (("engine_dead", "not_memory"), (text, 4))


@pytest.mark.parametrize(
    "text", [ILLEGAL, "AssertionError", "AssertionError: expert count 7 is odd"]
)
@pytest.mark.parametrize(
    "head", [HEAD, "EngineCore encountered a fatal error.", "Process EngineCore_DP0:"]
)
def test_a_core_that_reports_its_end_needs_no_front_end(head, text):
    incident = one(*block(CORE, head, TRACEBACK, FRAME, text))
    assert (cause(incident), error(incident)) == (("engine_dead", "not_memory"), (text, 4))
    assert incident.framework == "vllm"


def test_first_of_several_ranks_names_the_cause():
    ranks = [
        line
        for rank in (1, 0)
        for line in block(
            WORKER.format(rank, rank), "WorkerProc hit an exception.", TRACEBACK, FRAME, ILLEGAL
        )
    ]
    core = block(CORE, "EngineCore encountered a fatal error.", TRACEBACK, FRAME)
    quoted = (
        CORE
        + "RuntimeError: Worker failed with error 'CUDA error', please check the stack trace above for the root cause"
    )
    incident = one(
        *ranks,
        *core,
        quoted,
        "(APIServer pid=30) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    )
    assert (cause(incident), error(incident)) == (("engine_dead", "not_memory"), (ILLEGAL, 4))


def test_quoted_worker_error_counts_if_nothing_else_exists():
    quoted = "RuntimeError: Worker failed with error 'index 3 is out of bounds for dimension 0 with size 3'"
    incident = one(*block(CORE, "EngineCore encountered a fatal error.", TRACEBACK, FRAME, quoted))
    assert error(incident) == (quoted, 4)


@pytest.mark.parametrize(
    ("joint", "line"),
    [(DIRECT, 4), (DURING, 9)],
    ids=["raise from", "raised while another was handled"],
)
def test_the_root_of_a_chain(joint, line):
    first, last = (
        "ImportError: libacme.so.3: cannot open shared object file",
        "RuntimeError: kernel library is not usable",
    )
    incident = one(
        *block(CORE, HEAD, TRACEBACK, FRAME, first, "", joint, "", TRACEBACK, FRAME, last)[:8],
        *block(CORE, last),
    )
    assert error(incident)[0] == (first if line == 4 else last)
    assert error(incident)[1] == line


def test_a_message_on_the_lines_behind_is_part_of_it():
    texts = (
        HEAD,
        TRACEBACK,
        FRAME,
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, no such head size",
    )
    assert error(one(*block(CORE, *texts), FRONT))[0].endswith(
        "for ModelConfig Value error, no such head size"
    )


def test_sglangs_scheduler():
    log = [
        "[2026-03-01 06:01:00 TP2] Scheduler hit an exception: " + TRACEBACK,
        '  File "/sgl/python/sglang/srt/managers/scheduler.py", line 700, in run_scheduler_process',
        "    scheduler = Scheduler(server_args)",
        "AssertionError: page size 3 is not supported",
        "",
        "[2026-03-01 06:01:00] Received sigquit from a child process. It usually means the child failed.",
    ]
    incident = one(*log)
    assert cause(incident) == ("engine_dead", "not_memory")
    assert error(incident) == ("AssertionError: page size 3 is not supported", 4)
    alone = one(*log[:4])
    assert (alone.framework, cause(alone)) == ("sglang", ("engine_dead", "not_memory"))


def test_a_shard_of_text_generation_inference():
    stamp = "2026-03-06T17:53:31.052367Z ERROR "
    log = [
        stamp + "shard-manager: text_generation_launcher: Shard complete standard error output:",
        "",
        "/opt/acme/cextension.py:33: UserWarning: compiled without GPU support",
        "  warn(msg)",
        TRACEBACK,
        '  File "/opt/acme/bin/text-generation-server", line 8, in <module>',
        "NotImplementedError: AcmeForCausalLM is not supported",
        " rank=0",
        "Error: ShardCannotStart",
    ]
    incident = one(*log)
    assert (cause(incident), error(incident)[1]) == (("engine_dead", "not_memory"), 7)
    assert incident.framework == "tgi"


def test_an_executor_of_tensorrt_llm():
    said = "[TensorRT-LLM][ERROR] Assertion failed: head size 3 is not supported (/src/acme/runner.cpp:180)"
    incident = one(
        f"[03/06/2026-01:30:42] [TRT-LLM] [RANK 0] [E] Failed to initialize executor on rank 0: {said}",
        "1       0x7fac7ac778fd tensorrt_llm::common::throwRuntimeError(char const*, int, char const*) + 97",
        "RuntimeError: Executor worker returned error",
    )
    assert (cause(incident), error(incident)) == (("engine_dead", "not_memory"), (said, 1))


def test_a_collective_that_timed_out_is_quoted():
    said = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE) ran for 600021 milliseconds before timing out."
    incident = one(
        f"[rank1]:[E722 07:14:52.123456789 ProcessGroupNCCL.cpp:632] [Rank 1] {said}",
        CORE
        + "Worker proc VllmWorker-1 died unexpectedly (exit code: -6), shutting down executor.",
    )
    assert error(incident) == (said, 1)
    assert cause(incident) == ("engine_dead", "not_memory")


@pytest.mark.parametrize(
    ("signal", "named"),
    [(4, "illegal_instruction"), (6, "native_crash"), (11, "native_crash"), (9, "unknown")],
)
def test_a_signal_without_an_exception_is_the_cause(signal, named):
    incident = one(
        CORE
        + f"Worker proc VllmWorker-0 died unexpectedly (exit code: -{signal}), shutting down executor."
    )
    assert (cause(incident), incident.facts["exit_signal"].value) == (
        ("engine_dead", named),
        signal,
    )


def test_crash_is_not_explained_by_its_own_consequence():
    died = (
        CORE + "Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting down executor."
    )
    incident = one(
        died,
        *block(
            CORE,
            "EngineCore encountered a fatal error.",
            TRACEBACK,
            FRAME,
            "RuntimeError: cancelled",
        ),
    )
    assert cause(incident) == ("engine_dead", "illegal_instruction")
    assert "engine_error" not in incident.facts


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: cancelled",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "EOFError",
    ],
)
def test_consequence_of_another_processs_end_is_no_cause(text):
    died = CORE + "Worker proc VllmWorker-3 died unexpectedly{}, shutting down executor."
    core = block(CORE, "EngineCore encountered a fatal error.", TRACEBACK, FRAME, text)
    incident = one(died.format(""), *core)
    assert (cause(incident), error(incident)) == (("engine_dead", "unknown"), (text, 5))
    killed = one(died.format(" (exit code: -9)"), *core)
    assert [one.rule for one in killed.causes] == ["OG906"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("(EngineCore_DP0 pid=31) Fatal Python error: Segmentation fault", 11),
        ("(EngineCore_DP0 pid=31) Fatal Python error: Bus error", 7),
        ("(Worker_TP0 pid=40) !!!!!!! Segfault encountered !!!!!!!", 11),
        ("(RayWorkerWrapper pid=9) *** SIGABRT received at time=1747633685 on cpu 74 ***", 6),
        (
            "mpirun noticed that process rank 0 with PID 7 on node acme exited on signal 11 (Segmentation fault).",
            11,
        ),
        ("[acme:00007] Signal: Illegal instruction (4)", 4),
    ],
)
def test_a_signal_that_only_its_process_prints_is_read(text, number):
    assert one(text, FRONT).facts["exit_signal"].value == number


def test_memory_exception_in_unknown_words_is_quoted():
    incident = one(
        *block(
            CORE,
            HEAD,
            TRACEBACK,
            FRAME,
            "RuntimeError: the workspace could not get enough: insufficient memory",
        ),
        FRONT,
    )
    assert cause(incident) == ("engine_dead", "unknown")
    assert "insufficient memory" in incident.causes[0].explanation


def test_death_with_a_memory_failure_in_its_text_stays_one():
    other = block(WORKER.format(1, 1), "WorkerProc hit an exception.", TRACEBACK, FRAME, MISSING)
    core = block(CORE, "EngineCore encountered a fatal error.", TRACEBACK, FRAME, OOM)
    for log in (core, [*other, *core, FRONT], [*core, *other, FRONT]):
        assert one(*log).kind == "cuda_oom"


def test_each_start_has_its_own_cause():
    started = "(EngineCore_DP0 pid={}) INFO 11-22 04:20:47 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='./acme', dtype=torch.float16, max_seq_len=8192"
    first = [started.format(31), *block(CORE, HEAD, TRACEBACK, FRAME, MISSING), FRONT]
    second = [
        started.format(51),
        *block(CORE.replace("31", "51"), HEAD, TRACEBACK, FRAME, ILLEGAL),
        FRONT,
    ]
    found = diagnose("\n".join([*first, *second])).incidents
    assert [error(incident) for incident in found] == [(MISSING, 5), (ILLEGAL, 11)]


@pytest.mark.parametrize(
    "log",
    [
        [TRACEBACK, '  File "train.py", line 3, in <module>', "ValueError: no rows"],
        [
            "Process SpawnProcess-1:",
            TRACEBACK,
            '  File "train.py", line 3, in <module>',
            "ValueError: no rows",
        ],
        block(
            "(APIServer pid=30) ERROR 07-09 10:00:00 [serving.py:7] ",
            TRACEBACK,
            FRAME,
            "ValueError: no such model",
        ),
        block(
            "(EngineCore_DP0 pid=31) ",
            "Process EngineCore_DP0:",
            TRACEBACK,
            FRAME,
            "KeyboardInterrupt",
        ),
        block(
            CORE.replace("ERROR", "WARNING"),
            "no flash attention",
            TRACEBACK,
            FRAME,
            "ImportError: no acme kernels",
        ),
        [
            *block(
                WORKER.format(0, 0),
                "WorkerProc hit an exception.",
                TRACEBACK,
                FRAME,
                "ValueError: adapter of rank 64",
            ),
            '(APIServer pid=30) INFO:     10.1.0.4:52776 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        ],
        [
            "(APIServer pid=30) INFO 07-09 [logger.py:41] Received request cmpl-1: prompt: 'EngineCore failed to start.'",
            TRACEBACK,
            FRAME,
            MISSING,
        ],
        ['logger.exception("EngineCore failed to start.")', TRACEBACK, FRAME, MISSING],
        [
            "(APIServer pid=30) INFO 07-09 10:00:00 [launcher.py:1] [shutdown] API server: shutdown triggered",
            *block(
                CORE,
                "EngineCore encountered a fatal error.",
                TRACEBACK,
                FRAME,
                "RuntimeError: cancelled",
            ),
            "(APIServer pid=30) INFO 07-09 10:00:00 [core_client.py:1] [shutdown] MPClient: engine core exited unexpectedly; starting cleanup",
        ],
    ],
    ids=[
        "a script",
        "its child",
        "a front end",
        "Ctrl-C",
        "a warning",
        "a request",
        "a prompt",
        "source code",
        "a stop",
    ],
)
def test_what_is_no_death_of_an_engine(log):
    assert diagnose("\n".join(log)).incidents == ()


def healthy(n):
    return f"(EngineCore_DP0 pid=31) INFO 07-09 10:00:00 [loggers.py:7] step {n:07} took 3 ms and nothing else happened"


@pytest.mark.parametrize(
    "lines",
    [6000, BLOCK_BYTES // (len(healthy(0)) + 1) - 50],
    ids=["in a block", "over the end of a block"],
)
def test_a_long_log_keeps_the_exception_far_below_its_head(tmp_path, lines):
    log = tmp_path / "long.log"
    before, after = [healthy(n) for n in range(lines)], [healthy(n) for n in range(20)]
    frame = '  File "/opt/acme/stages.py", line 7, in stage'
    frames = block(
        CORE, *[line for _ in range(80) for line in (frame, "    value = next_stage(value)")]
    )
    log.write_text(
        "\n".join([*before, *block(CORE, HEAD, TRACEBACK), *frames, CORE + MISSING, *after, FRONT])
    )
    assert log.stat().st_size > SHORT_BYTES
    (incident,) = diagnose(log).incidents
    assert error(incident) == (MISSING, lines + 2 + 160 + 1)


def test_two_streams_are_read_together():
    scanner = Scanner(default_rules())
    scanner.push(Line(1, 0, FRONT), "stderr")
    for number, text in enumerate(block(CORE, HEAD, TRACEBACK, FRAME, MISSING), 1):
        scanner.push(Line(number, 0, text), "stdout")
    (incident,) = scanner.diagnosis("").incidents
    assert error(incident) == (MISSING, 4)


# The sentence that the text shows no cause, and the texts at hand that it may not be printed of.
CORPORA = Path(__file__).parents[3] / "shared"
SILENT = "this text does not show why"
_EXCEPTION = re.compile(r"(?:^|[\s\])])((?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception): \S.*)")
_PARENTS = re.compile(
    r"See root cause above|See stack trace|EngineCore encountered an issue|in a background process|died (?:unexpectedly|with exit code)"
    r"|failed to start|Executor worker returned error|errored already|EngineDeadError"
)
_SIGNAL = re.compile(
    r"exit code:? -\d|Fatal Python error|\bsignal \d|\*\*\* SIG|Segfault encountered"
)
OWN = [
    [FRONT],
    [*block(CORE, HEAD, TRACEBACK, FRAME, MISSING), FRONT],
    [
        *block(
            CORE,
            HEAD,
            TRACEBACK,
            FRAME,
            "ValueError: no acme",
            "",
            DURING,
            "",
            TRACEBACK,
            FRAME,
            "KeyError: 'acme'",
        ),
        FRONT,
    ],
    ["ValueError: vocabulary of 7 entries is too small", FRONT],
    [CORE + "Worker proc VllmWorker-0 died unexpectedly (exit code: -11), shutting down executor."],
    ["Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor."],
    [
        "[2026-03-01 06:01:00] Received sigquit from a child process. It usually means the child failed."
    ],
    [FRONT, "RuntimeError: Worker failed with error 'index 3 is out of bounds'"],
]


def corpora():
    for path in sorted(CORPORA.glob("corpus/*.jsonl")):
        yield from (json.loads(line)["text"] for line in path.read_text().splitlines())
    for folder in ("faults/logs", "seeds"):
        yield from (
            path.read_text(errors="replace") for path in sorted((CORPORA / folder).glob("*"))
        )


def shows_a_cause(text):
    ones = [
        found[1]
        for line in text.splitlines()
        if "APIServer" not in line and (found := _EXCEPTION.search(line))
    ]
    return (
        any(not _PARENTS.search(said) and not passes_on(said) for said in ones)
        or _SIGNAL.search(text) is not None
    )


def untrue(texts):
    silent = [
        text
        for text in texts
        if any(SILENT in incident.headline for incident in diagnose(text).incidents)
    ]
    return silent, [text for text in silent if shows_a_cause(text)]


def test_the_sentence_that_no_cause_is_shown_is_true_of_our_logs():
    silent, wrong = untrue(["\n".join(log) for log in OWN])
    assert len(silent) == 3
    assert wrong == []


def test_no_cause_sentence_is_true_of_every_text():
    texts = list(corpora())
    if not texts:
        pytest.skip("no corpus of real excerpts lies beside this checkout")
    silent, wrong = untrue(texts)
    assert silent, "the corpora have deaths without a cause"
    assert wrong == []
