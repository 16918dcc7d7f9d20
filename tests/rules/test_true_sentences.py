"""Sentences that are true of their log: each test has a log for which an earlier sentence was not."""

from __future__ import annotations

import oomguard
from oomguard.incident import Incident


def failed(text: str) -> Incident:
    """The first failure of a log."""
    return oomguard.diagnose(text).incidents[0]


def panel(text: str) -> str:
    """The panel of a log, on one line."""
    return " ".join(str(oomguard.diagnose(text)).replace("│", " ").split())


def test_the_check_of_free_memory_comes_before_the_weights():
    check = failed(
        "(EngineCore pid=31) ValueError: Free memory on device cuda:0 (9.5/23.6 GiB) on startup is less than desired "
        "GPU memory utilization (0.9, 21.24 GiB)."
    )

    assert check.phase == "unknown"
    assert check.is_at_start


def test_one_message_in_two_wordings_was_seen_once():
    once = """\
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 2048.00 MiB on device 0: cudaMalloc failed: out of memory
ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 2147483648
graph_reserve: failed to allocate compute buffers
"""
    wrapped = """\
torch.cuda.OutOfMemoryError: CUDA out of memory.
Tried to allocate 3.00 GiB
(GPU 0; 8.00 GiB total capacity; 6.50 GiB already allocated; 1.10 GiB free)
"""
    whole = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
        " of which 1.10 GiB is free.\n"
    )

    assert [failed(text).repeated for text in (once, wrapped, whole, whole * 2)] == [1, 1, 1, 2]
