"""What somebody tells of a failure in words of their own: bound to the engine's words, and below what the engine printed itself."""

from __future__ import annotations

import pytest

from oomguard.diagnosing import diagnose
from oomguard.incident import Incident

FRAMES = """[2026-01-12 09:20:12] Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/sglang/python/sglang/srt/model_executor/model_runner.py", line 2160, in forward_extend
    return self.model.forward(
"""
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.72 GiB. GPU 0 has a total capacity of 79.10 GiB of which 522.31 MiB"
    " is free. Process 91340 has 78.58 GiB memory in use.\n"
)
TOLD = "With sglang the server hit CUDA OOM, the log:\n\n"


def found(text: str) -> list[Incident]:
    return [incident for incident in diagnose(text).incidents if incident.is_oom]


@pytest.mark.parametrize("known", ["On SGLang ", "With --mem-fraction-static 0.9 "])
def test_it_counts_beside_words_of_the_engine(known):
    assert [i.framework for i in found(f"{known}the server OOM'd at 64 requests.")] == ["sglang"]


@pytest.mark.parametrize("before", ["If", "It may be that", "Without the change"])
def test_a_condition_before_it_tells_no_failure(before):
    assert not found(f"SGLang: {before} the server OOM'd at 64 requests.")


def test_frames_far_below_tell_what_it_speaks_of():
    lines = "".join(f"[2026-01-12 09:20:{second:02}] a line of the log\n" for second in range(40))

    assert [i.phase for i in found(TOLD + lines + FRAMES)] == ["prefill"]


def test_the_engine_s_own_message_takes_its_place_and_keeps_its_figures():
    text = f"SGLang: 0.97 OOMs during CUDA graph capture.\n\n{MESSAGE}"
    (incident,) = found(text)

    assert incident.message.startswith("CUDA out of memory. Tried to allocate 1.72 GiB")
    assert incident.facts["mem_fraction_static_ratio"].value == 0.97


def test_what_is_told_behind_the_engine_s_own_message_adds_no_failure():
    assert len(found(FRAMES + MESSAGE + "\nSo sglang died with OOM.\n")) == 1


def test_a_start_that_is_pasted_below_is_the_one_that_is_told_of():
    start = "[2026-01-12 09:14:02] server_args=ServerArgs(model_path='/srv/m', mem_fraction_static=0.9, tp_size=1)\n"
    (incident,) = found(TOLD + start + FRAMES)

    assert (incident.start, incident.facts["mem_fraction_static_ratio"].value) == (1, 0.9)
