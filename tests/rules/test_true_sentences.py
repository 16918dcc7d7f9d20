"""Sentences that are true of their log: each test has a log for which an earlier sentence was not."""

from __future__ import annotations

import io

from rich.console import Console

import oomguard
from oomguard.core.incident import Incident
from oomguard.report.panel import print_diagnosis


def failed(text: str) -> Incident:
    """The first failure of a log."""
    return oomguard.diagnose(text).incidents[0]


def panel(text: str) -> str:
    """The panel of a log, on one line."""
    console = Console(file=io.StringIO(), width=400, highlight=False)
    print_diagnosis(console, oomguard.diagnose(text), None)
    return " ".join(console.file.getvalue().replace("│", " ").split())


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


def test_experts_spread_over_ranks_have_no_estimated_size():
    moe = """\
$ vllm serve acme/Moe-90B-A9B-FP8 --data-parallel-size 4 --enable-expert-parallel
ValueError: To serve at least one request with the models's max seq len (65536), (9.00 GiB KV cache is needed, \
which is larger than the available KV cache memory (7.50 GiB). Based on the available memory, the estimated maximum \
model length is 54608.
"""

    assert "estimated_weights_bytes" not in failed(moe).facts


def test_weights_that_left_room_are_no_cause():
    room = """\
$ vllm serve acme/Big-70B
ValueError: To serve at least one request with the models's max seq len (65536), (9.00 GiB KV cache is needed, \
which is larger than the available KV cache memory (7.50 GiB). Based on the available memory, the estimated maximum \
model length is 54608.
"""
    graphs = """\
$ serve --model acme/Big-70B
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB. GPU 0 has a total capacity of 23.60 GiB of \
which 21.56 MiB is free. Of the allocated memory 20.85 GiB is allocated by PyTorch, with 22.00 MiB allocated in private \
pools (e.g., CUDA Graphs), and 36.30 MiB is reserved by PyTorch but unallocated.
"""

    assert "weights_do_not_fit" not in panel(room)
    assert "weights_do_not_fit" not in panel(graphs)


def test_a_quantized_model_is_not_told_to_be_quantized():
    named = """\
$ serve --model acme/Tiny-7B-NVFP4
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB. GPU 0 has a total capacity of 3.00 GiB of \
which 21.56 MiB is free.
"""
    repacked = """\
(EngineCore pid=7) ERROR 05-05 07:35:19 [core.py:1136]   File "/opt/vllm/_custom_ops.py", line 9, in awq_marlin_repack
(EngineCore pid=7) ERROR 05-05 07:35:19 [core.py:1136] RuntimeError: CUDA driver error: out of memory
"""

    for shown in (panel(named), panel(repacked)):
        assert "No quantized checkpoint" not in shown
        assert "Use a quantized" not in shown
        assert "in 4 bits" not in shown


def test_ollama_refuses_before_it_loads():
    text = "Error: model requires more system memory (22.5 GiB) than is available (6.0 GiB)"
    shown = panel(text)

    assert (failed(text).framework, failed(text).phase) == ("ollama", "unknown")
    assert "Use a smaller model: this one needs 22.50 GiB, and 6.00 GiB is available" in shown
    assert "ended while" not in shown
    assert "-c " not in shown


def test_each_program_around_ggml_gets_its_own_options():
    graph = """\
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9000.00 MiB on device 0: cudaMalloc failed: out of memory
ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 9437184000
"""
    load = 'level=INFO source=runner.go:9 msg=load request="{Operation:alloc Parallel:1 KvSize:65536}"\n'
    python = "ValueError: Failed to create llama_context\n"

    assert "OLLAMA_CONTEXT_LENGTH=32768 ollama serve" in panel(load + graph)
    assert "-ngl" not in panel(load + graph)
    assert "n_gpu_layers=N" in panel(graph + python)
    assert "-ngl N" in panel(graph)
    assert failed(graph).causes[0].id == "batch_too_large"


def test_an_error_that_nccl_does_not_name_may_be_of_memory():
    text = """\
ERROR 11-04 18:02:56 [core.py:597] EngineCore failed to start.
ERROR 11-04 18:02:56 [core.py:597] Traceback (most recent call last):
ERROR 11-04 18:02:56 [core.py:597]   File "/opt/vllm/pynccl.py", line 162, in all_reduce
ERROR 11-04 18:02:56 [core.py:597] RuntimeError: NCCL error: unhandled cuda error (run with \
NCCL_DEBUG=INFO for details) host7:21:21 [0] NCCL INFO cudaDriverVersion 12080
"""
    dead = failed(text)

    assert (dead.kind, dead.causes[0].rule) == ("engine_dead", "OG911")
    assert dead.facts["engine_error"].value.endswith("for details)")
    assert "Run it again with NCCL_DEBUG=INFO" in dead.actions[0].title
    assert "not about memory" not in panel(text)


def test_an_error_of_ptxas_is_the_engines_own():
    text = """\
[rank0]:E0701 14:28:21.083000 42 torch/_inductor/runtime/triton_heuristics.py:539] [0/0] ptxas /tmp/a.ptx, line 9; \
error   : PTX .version 8.1 does not support .target sm_120a
[rank0]:E0701 14:28:21.083000 42 torch/_inductor/runtime/triton_heuristics.py:539] [0/0] ptxas fatal   : Ptx assembly \
aborted due to errors
ERROR 07-01 14:28:21 [core.py:515] EngineCore failed to start.
"""

    assert "does not support .target sm_120a" in failed(text).facts["engine_error"].value
    assert "does not show why" not in panel(text)


def test_program_whose_call_is_fixed_gets_its_own_flag():
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 320.00 MiB. GPU 0 has a total capacity of 8.00 GiB"
        " of which 64.00 MiB is free.\n"
    )
    comfy = '  File "/srv/ComfyUI/execution.py", line 7, in execute\n' + message
    web = '  File "/srv/stable-diffusion-webui/modules/txt2img.py", line 7, in txt2img\n' + message

    assert [failed(text).actions[0].command for text in (comfy, web)] == [
        "python main.py --lowvram",
        "export COMMANDLINE_ARGS=--medvram; ./webui.sh",
    ]
    assert "wrap_in_guard" not in {
        action.id for text in (comfy, web) for action in failed(text).actions
    }
    assert "import oomguard first" in failed(message).actions[0].command


def test_engines_own_flag_names_its_setting_and_value():
    text = """\
server_args=ServerArgs(model_path='acme/Tiny-7B', max_running_requests=48, chunked_prefill_size=4096)
RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.60 GiB of which 1.00 GiB \
is free.
  File "/opt/sglang/srt/managers/scheduler.py", line 9, in run_batch
"""

    assert "Lower --max-running-requests, now 48: try 24" in panel(text)
    assert "max_num_seqs" not in panel(text)


def test_who_holds_the_memory_is_what_the_message_shows():
    old = (
        "RuntimeError: CUDA out of memory. Tried to allocate 24.00 MiB (GPU 0; 10.00 GiB total capacity; 700.00 MiB already"
        " allocated; 16.00 MiB free; 800.00 MiB reserved in total by PyTorch)"
    )
    listed = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.70 GiB of"
        " which 1.10 GiB is free. Process 11 has 7.71 GiB memory in use. Including non-PyTorch memory, this process has 6.86"
        " GiB memory in use. Of the allocated memory 6.30 GiB is allocated by PyTorch, and 0.40 GiB is reserved by PyTorch but"
        " unallocated."
    )
    no_reserve = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.70 GiB of"
        " which 1.10 GiB is free. Including non-PyTorch memory, this process has 14.00 GiB memory in use. Of the allocated"
        " memory 13.00 GiB is allocated by PyTorch."
    )
    mps = (
        "RuntimeError: MPS backend out of memory (MPS allocated: 9.50 GiB, other allocations: 4.00 MiB, max allowed: 10.00"
        " GiB). Tried to allocate 800.00 MiB on private pool."
    )

    assert "not shown as this process's" in panel(old)
    assert "other processes" not in panel(old)
    assert "7.71 GiB is neither free nor" in panel(listed)
    assert "non-torch" not in panel(no_reserve)
    assert "tensors" not in panel(mps)
    assert "Nothing but" not in panel(mps)


def test_a_front_end_prints_what_another_process_says():
    text = "(APIServer pid=4) (DPEngineCoreActor pid=9) ERROR 01-01 00:00:00 [core.py:1525] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB."

    assert failed(text).location.process == "DPEngineCoreActor pid=9"


def test_sglang_pool_is_no_batch_and_request_table_no_cache():
    pool = """\
  File "/opt/sglang/srt/hardware_backend/npu/memory_pool_npu.py", line 12, in _create_buffers
    self.kv_buffer = torch.zeros(
RuntimeError: NPU out of memory. Tried to allocate 70.00 GiB (NPU 0; 60.96 GiB total capacity; 20.00 GiB already \
allocated; 20.00 GiB current active; 40.00 GiB free; 20.10 GiB reserved in total by PyTorch)
"""
    table = (
        "RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for `--max-running-requests`. "
        "self.req_to_token_pool.available_size()=3, num_reqs=5, "
    )

    assert (failed(pool).phase, failed(pool).causes[0].id) == ("kv_cache_init", "kv_cache_budget")
    assert failed(table).phase == "unknown"
    assert "Too few places in the table of requests: 5 requested, 3 free" in panel(table)
    assert "mem_fraction_static" not in {action.id for action in failed(table).actions}


def test_one_sequence_at_a_time_is_the_least():
    text = """\
TurbomindEngineConfig(dtype='auto', tp=1, session_len=4096, max_batch_size=1, cache_max_entry_count=0.5)
[TM][ERROR] CUDA runtime error: out of memory /opt/lmdeploy/src/turbomind/core/allocator.cc:9
"""

    assert "max-batch-size" not in panel(text)


def test_a_margin_is_what_the_value_leaves():
    text = "ValueError: Free memory on device (3.10/4.0 GiB) on startup is less than desired GPU memory utilization (0.9, 3.6 GiB)."

    action = next(one for one in failed(text).actions if one.id == "gpu_memory_utilization")
    assert f"margin {3.10 - action.new * 4.0:.2f} GiB" in action.why


def test_how_many_devices_an_unknown_engine_can_use_is_not_known():
    text = """\
$ serve --model acme/Big-30B
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB. GPU 0 has a total capacity of 23.60 GiB of \
which 21.56 MiB is free. Of the allocated memory 21.85 GiB is allocated by PyTorch, with 22.00 MiB allocated in private \
pools (e.g., CUDA Graphs), and 36.30 MiB is reserved by PyTorch but unallocated.
"""

    assert "tensor_parallel_size" not in {action.id for action in failed(text).actions}
    assert "If the engine is vLLM, lower" in panel(text)
