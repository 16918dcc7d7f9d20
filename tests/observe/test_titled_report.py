"""A report whose title tells the failure, while its body shows the run and not the message."""

from __future__ import annotations

import pytest

from oomguard.diagnosing import diagnose

FRAMES = """
Traceback (most recent call last):
  File "/srv/app/serve.py", line 12, in <module>
    engine = build(config)
  File "/srv/app/engine.py", line 80, in build
    self.cache = torch.zeros(
"""
TOLD = "\nI get this on two cards. It loads and then stops.\n"


def kinds(text: str) -> list[str]:
    return [incident.kind for incident in diagnose(text).incidents]


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("# [Bug]: NPU out of memory with four cards", "npu_oom"),
        ("[Bug] CUDA OOM during image encoding", "cuda_oom"),
        ("# 4090 24G: out of memory", "cuda_oom"),
        ("# RuntimeError: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", "cublas_alloc"),
        ("# Fix OOM with a long context on GPU", "cuda_oom"),
        ("CUDA OOM on the first request", "cuda_oom"),
    ],
)
def test_a_title_above_frames_is_a_failure_of_its_kind(title, kind):
    assert kinds(title + FRAMES) == [kind]


def test_a_marked_title_above_what_somebody_tells_of_a_run_is_one():
    assert kinds("# Out of memory on a 3090" + TOLD) == ["cuda_oom"]


@pytest.mark.parametrize(
    "title",
    [
        "# [Feature]: estimate the length instead of an OOM",
        "# How to avoid CUDA out of memory",
        "# CUDA out of memory: solution",
        "# Misleading OOM message",
        "# feat: handle out-of-memory in the batcher",
        "# Out-of-memory handling of the pool",
    ],
)
def test_a_title_that_asks_or_explains_is_none(title):
    assert kinds(title + TOLD) == []


def test_a_title_above_a_page_of_documentation_is_none():
    assert kinds("# CUDA out of memory\n\nThis page lists the settings that decide how much a server takes.\n") == []


def test_a_title_above_another_error_is_none():
    assert kinds("# [Bug]: OOM?" + FRAMES + "ValueError: unknown model type\n") == []


def test_a_change_without_frames_is_none():
    assert kinds("# Fix OOM with a long context on GPU" + TOLD) == []


def test_a_sentence_above_frames_is_no_title():
    assert kinds("The container tells OOM as the reason of its end, and the test expects that." + FRAMES) == []


def test_what_the_body_prints_is_told_and_not_the_title():
    found = diagnose(
        "# [Bug]: OOM" + FRAMES + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )

    assert [incident.number("tried_bytes") for incident in found.incidents] == [2 << 30]


def test_the_title_is_told_with_less_than_certainty():
    (found,) = diagnose("[Bug] CUDA OOM during image encoding" + FRAMES).incidents

    assert found.certainty_ratio == 0.8
    assert all(cause.confidence <= 0.8 for cause in found.causes)


@pytest.mark.parametrize(
    "line", ["2026-01-01 00:00:00 INFO OOM watch is on", "[INFO] CUDA OOM watch is on", "INFO CUDA OOM watch is on"]
)
def test_a_log_s_first_line_is_no_title(line):
    assert kinds(line + FRAMES) == []


def test_another_error_of_the_device_is_another_error():
    assert (
        kinds("# [Bug]: OOM?" + FRAMES + "RuntimeError: CUDA error: an illegal memory access was encountered\n") == []
    )


def test_the_frames_of_a_long_report_tell_what_its_title_speaks_of():
    settings = "".join(f"  --option-{number} value\n" for number in range(40))
    frames = '  File "/opt/sglang/srt/model_executor/model_runner.py", line 900, in forward_extend\n    return self.model.forward(\n'
    report = f"[Bug] NPU out of memory\n```\npython -m sglang.launch_server\n{settings}\nTraceback (most recent call last):\n{frames}"

    assert [incident.phase for incident in diagnose(report).incidents] == ["prefill"]
