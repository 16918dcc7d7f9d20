"""Test the first actions of whole logs, as a user sees them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from oomguard.diagnosis import diagnose_lines
from oomguard.scan.source import read_lines

if TYPE_CHECKING:
    from oomguard.core.incident import Incident


def _first_cause(text: str) -> Incident:
    found = diagnose_lines(read_lines(io.BytesIO(text.encode()))).first_cause
    assert found is not None
    return found


def test_known_weights_at_a_high_share_need_a_smaller_checkpoint() -> None:
    incident = _first_cause(
        """\
INFO 03-04 10:00:00 api_server.py:528] vLLM API server version 0.6.4
INFO args: Namespace(model='org/Model-13B', tensor_parallel_size=1, gpu_memory_utilization=0.92)
INFO 03-04 10:01:00 model_runner.py:1067] Loading model weights took 22.4000 GB
ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.
"""
    )
    names = [action.id for action in incident.actions]
    assert names[:2] == ["smaller_checkpoint", "tensor_parallel_size"]
    assert "gpu_memory_utilization" not in names


def test_llamacpp_context_fits_the_printed_buffers() -> None:
    incident = _first_cause(
        """\
llama_model_load_from_file_impl: using device CUDA0 (NVIDIA RTX A5000) (0000:02:00.0) - 14000 MiB free
load_tensors:        CUDA0 model buffer size =  6000.00 MiB
llama_context: n_ctx         = 65536
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9216.00 MiB on device 0: cudaMalloc failed: out of memory
llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache
"""
    )
    first, second = incident.actions[:2]
    assert (first.id, first.new) == ("ctx_size", 41984)
    assert first.title == "Lower the context (-c) from 65536 to 41984"
    assert 6000 + 9216 * 41984 / 65536 < 14000 - 512
    assert second.id == "kv_cache_dtype"


def test_many_lora_slots_are_lowered_before_anything_else() -> None:
    incident = _first_cause(
        """\
INFO 03-04 10:00:00 api_server.py:528] vLLM API server version 0.11.0
  File "/opt/vllm/lora/layers/base_linear.py", line 70, in create_lora_weights
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total \
capacity of 47.40 GiB of which 200.00 MiB is free. Including non-PyTorch memory, this process \
has 47.20 GiB memory in use. Of the allocated memory 46.50 GiB is allocated by PyTorch, and \
20.00 MiB is reserved by PyTorch but unallocated.
options: --enable-lora --max-loras 32 --max-lora-rank 128
"""
    )
    first, second = incident.actions[:2]
    assert (first.id, first.new) == ("max_loras", None)
    assert second.id == "max_lora_rank"


_TOO_LONG = """\
+ vllm serve org/Model-9B --max-model-len 30000 --gpu-memory-utilization 0.88
(EngineCore_DP0 pid=71) ERROR 05-06 08:00:00 [core.py:843] ValueError: To serve at least one \
request with the model's max seq len (30000), 4.00 GiB KV cache is needed, which is larger than \
the available KV cache memory (3.10 GiB). Based on the available memory, the estimated maximum \
model length is 23248.
"""
_WARM_UP = """\
+ vllm serve org/Model-9B --max-model-len 30000 --gpu-memory-utilization 0.96
(EngineCore_DP0 pid=PID) ERROR 05-06 08:05:00 [core.py:843] RuntimeError: CUDA out of memory \
occurred when warming up sampler with 512 dummy requests. Please try lowering `max_num_seqs` or \
`gpu_memory_utilization` when initializing the engine.
"""


def test_the_last_of_several_starts_gets_the_action() -> None:
    again = _first_cause(_TOO_LONG + _WARM_UP.replace("PID", "95"))
    assert again.kind == "sampler_warmup_oom"
    assert again.actions[0].id == "max_num_seqs"
    same_start = _first_cause(_TOO_LONG + _WARM_UP.replace("PID", "71"))
    assert same_start.kind == "kv_cache_too_small_for_max_len"


def test_a_share_near_the_whole_device_is_lowered_for_graphs() -> None:
    incident = _first_cause(
        """\
vllm serve openai/gpt-oss-20b --gpu-memory-utilization 0.97
(EngineCore pid=8) INFO 02-03 [gpu_worker.py:375] Available KV cache memory: 6.10 GiB
(EngineCore pid=8) ERROR 02-03 File "vllm/v1/worker/gpu_model_runner.py", line 44, in capture_model
(EngineCore pid=8) ERROR 02-03 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate \
120.00 MiB. GPU 0 has a total capacity of 23.60 GiB of which 50.00 MiB is free. Including \
non-PyTorch memory, this process has 23.40 GiB memory in use. Of the allocated memory 22.60 GiB \
is allocated by PyTorch, and 80.00 MiB is reserved by PyTorch but unallocated.
"""
    )
    first = incident.actions[0]
    assert first.id == "gpu_memory_utilization"
    assert isinstance(first.new, float)
    assert 0.85 < first.new < 0.97


def test_verl_lowers_the_share_of_its_rollout_first() -> None:
    incident = _first_cause(
        """\
overrides: ['actor_rollout_ref.rollout.gpu_memory_utilization=0.7', \
'actor_rollout_ref.actor.fsdp_config.optimizer_offload=False']
  File "/opt/verl/workers/sharding_manager/fsdp_vllm.py", line 90, in __enter__
    self.inference_engine.wake_up(tags=["weights"])
  File "/opt/vllm/device_allocator/cumem.py", line 60, in wake_up
RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62
"""
    )
    first, second = incident.actions[:2]
    assert first.command == "actor_rollout_ref.rollout.gpu_memory_utilization=0.5"
    assert "optimizer_offload=True" in (second.command or "")
