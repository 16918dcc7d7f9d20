"""Which exception ended a program, by what it printed last."""

from __future__ import annotations

import subprocess
import sys

import pytest

from oomguard.analyst import output as last_words_module
from oomguard.analyst.output import final_traceback
from oomguard.scan.lines import peel
from support.each import each


def printed(code: str) -> bytes:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).stderr


HANDLED = """
import traceback
try:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
except RuntimeError:
    traceback.print_exc()
"""


def test_the_last_of_two_tracebacks_ended_it():
    words = final_traceback(printed(HANDLED + "open('/no/such/file')"))

    assert (
        words.exception == "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'"
    )
    assert not any("out of memory" in line for line in words.lines)


def test_error_raised_while_handling_another_is_independent():
    code = "try:\n    raise RuntimeError('CUDA out of memory')\nexcept RuntimeError:\n    open('/no/such/file')"
    words = final_traceback(printed(code))

    assert words.exception.startswith("FileNotFoundError")
    assert not any("out of memory" in line for line in words.lines)


def test_a_direct_cause_belongs_to_it():
    code = "try:\n    raise RuntimeError('CUDA out of memory')\nexcept RuntimeError as e:\n    raise ValueError('no answer') from e"
    words = final_traceback(printed(code))

    assert words.exception == "ValueError: no answer"
    assert "RuntimeError: CUDA out of memory" in words.lines


@each(
    "above",
    [
        "Exception in thread Thread-1 (work):",
        "Exception ignored in: <function f>",
        "--- Logging error ---",
    ],
)
def test_a_traceback_that_ended_nothing_does_not_count(above):
    first = printed("raise MemoryError('all gone')").decode()
    tail = f"{first}{above}\nTraceback (most recent call last):\n  File \"x.py\", line 1, in f\nKeyError: 'a'\n"

    assert final_traceback(tail.encode()).exception == "MemoryError: all gone"


def test_output_after_a_traceback_means_it_did_not_end_there():
    assert final_traceback(printed(HANDLED) + b"still at work\n" * 50) is None


def test_no_traceback_is_no_last_words():
    assert final_traceback(b"error: it did not work\n") is None
    assert final_traceback(b"") is None


@pytest.mark.parametrize(
    "line",
    [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "subprocess.CalledProcessError: Command '['python', 'x.py']' returned non-zero exit status 1.",
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::f() (pid=1, ip=10.0.0.2)",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    ],
)
def test_what_only_passes_on_another_process_s_failure_is_known(line):
    tail = f'Traceback (most recent call last):\n  File "x.py", line 1, in f\n{line}\n'

    assert final_traceback(tail.encode()).passes_on


def test_the_prefix_of_a_process_is_no_part_of_it():
    tail = (
        "(APIServer pid=7) Traceback (most recent call last):\n"
        '(APIServer pid=7)   File "x.py", line 1, in f\n'
        "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )

    assert final_traceback(tail.encode()).exception.startswith(
        "RuntimeError: Engine core initialization failed"
    )


def test_an_output_of_many_lines_is_not_peeled_for_it(monkeypatch):
    peeled = []
    monkeypatch.setattr(last_words_module, "peel", lambda line: peeled.append(line) or peel(line))
    ended = printed("open('/no/such/file')")

    assert final_traceback(b"y\n" * 10_000) is None
    assert final_traceback(b"y\n" * 10_000 + ended).exception.startswith("FileNotFoundError")
    assert final_traceback(ended + b"y\n" * 10_000) is None
    assert len(peeled) < 100


@each(
    ("line", "is_one"),
    [
        ("AssertionError: 'CUDA out of memory. Tried to allocate 2 GiB' != 'x'", True),
        (
            "AssertionError: Error in memory profiling. Initial free memory 1, current free memory 2.",
            False,
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", False),
    ],
)
def test_a_test_that_compares_texts_is_known(line, is_one):
    traceback = (
        f'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\n{line}\n'
    )
    assert final_traceback(traceback.encode()).is_of_a_test is is_one


OF_OTHER_RANKS = [
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error",
    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (node-1, 29500).",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9130. GLHF!",
    "RuntimeError: NCCL communicator was aborted on rank 1.",
]


@each("line", OF_OTHER_RANKS)
def test_a_rank_that_lost_another_one_only_passes_on(line):
    tail = f'Traceback (most recent call last):\n  File "job.py", line 22, in <module>\n    dist.barrier()\n{line}\n'
    assert final_traceback(tail.encode()).passes_on


def test_a_connection_that_a_program_of_its_own_lost_ended_it():
    tail = 'Traceback (most recent call last):\n  File "a.py", line 2, in <module>\nConnectionRefusedError: [Errno 111] Connection refused\n'
    assert not final_traceback(tail.encode()).passes_on
