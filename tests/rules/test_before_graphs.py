"""Where torch names no private pool, vLLM had captured no graph: its share need not have been full."""

from __future__ import annotations

import oomguard

FRAME = '(EngineCore_DP0 pid=7) ERROR 01-17 20:30:51 [core.py:700]   File "/site-packages/vllm/model_executor/layers/layernorm.py", line 169, in forward_static'
OOM = "(EngineCore_DP0 pid=7) ERROR 01-17 20:30:51 [core.py:700] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 160.00 MiB. GPU 0 has a total capacity of 11.61 GiB of which 87.06 MiB is free. Including non-PyTorch memory, this process has 10.88 GiB memory in use. Of the allocated memory 10.48 GiB is allocated by PyTorch, {}and 163.53 MiB is reserved by PyTorch but unallocated."
POOLS = "with 24.00 MiB allocated in private pools (e.g., CUDA Graphs), "
CACHE = "(EngineCore_DP0 pid=7) INFO 01-17 20:30:41 [kv_cache_utils.py:1087] GPU KV cache size: 24,976 tokens"


def test_unknown_cause_without_graphs_has_a_deciding_command() -> None:
    incident = oomguard.diagnose("\n".join((FRAME, OOM.format("")))).incidents[0]
    assert incident.causes[0].id == "unknown"
    assert incident.missing is not None
    assert "Available KV cache memory" in incident.missing.command


def test_with_graphs_or_a_kv_cache_the_share_was_full() -> None:
    graphs = oomguard.diagnose("\n".join((FRAME, OOM.format(POOLS)))).incidents[0]
    cache = oomguard.diagnose("\n".join((CACHE, FRAME, OOM.format("")))).incidents[0]
    assert graphs.causes[0].id == cache.causes[0].id == "utilization_too_high"
