"""An engine that sleeps and finds its memory taken when it wakes up: what it freed, what stayed, and who holds it."""

from __future__ import annotations

import pytest

from oomguard.core.facts import GIB
from oomguard.diagnosis import diagnose

CUMEM = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163"
FRAMES = [
    '  File "/opt/acme/vllm/v1/worker/gpu_worker.py", line 171, in wake_up',
    "    allocator.wake_up(tags)",
    '  File "/opt/acme/vllm/device_allocator/cumem.py", line 240, in wake_up',
    "    create_and_map(handle)",
]
TRACEBACK = "Traceback (most recent call last):"
CORE = "(EngineCore_DP0 pid=31) "


def slept(freed, used, process=CORE):
    return f"{process}INFO 11-14 15:11:23 [gpu_worker.py:144] Sleep mode freed {freed:.2f} GiB memory, {used:.2f} GiB memory is still in use."


def one(*log):
    (incident,) = diagnose("\n".join(log)).incidents
    return incident


def first(incident):
    return incident.phase, incident.causes[0].id, incident.causes[0].rule


def test_frames_of_waking_up_are_enough():
    incident = one(TRACEBACK, *FRAMES, f"RuntimeError: {CUMEM}")
    assert (incident.kind, incident.framework) == ("cuda_oom", "vllm")
    assert first(incident) == ("wake_up", "sleep_wake", "OG389")
    assert "does not show how much memory" in incident.causes[0].explanation


def test_the_allocators_words_after_a_sleep_are_enough():
    incident = one(slept(35.4, 1.2), CORE + CUMEM)
    assert first(incident) == ("wake_up", "sleep_wake", "OG389")


def test_the_same_words_while_the_engine_starts_are_no_waking():
    incident = one(
        CORE + "INFO 11-14 15:11:23 [gpu_model_runner.py:1] Starting to load model acme/m-8b...",
        CORE + CUMEM,
    )
    assert incident.kind == "cuda_oom"
    assert "sleep_wake" not in {cause.id for cause in incident.causes}


def test_freed_and_kept_bytes_per_sleep_are_in_the_text():
    awake = CORE + "INFO 11-14 15:11:29 [abstract.py:324] It took 0.612 seconds to wake up."
    incident = one(
        slept(60, 2.5),
        awake,
        slept(60, 7.25),
        CORE
        + "INFO 11-14 15:11:23 [cumem.py:239] CuMemAllocator: sleep freed 58.00 GiB memory in total, of which 7.56 GiB is backed up",
        *(CORE + line for line in (TRACEBACK, *FRAMES, f"RuntimeError: {CUMEM}")),
    )
    facts = {name: fact.value for name, fact in incident.facts.items()}
    assert (facts["sleep_freed_bytes"], facts["sleep_used_bytes"]) == (60 * GIB, 7.25 * GIB)
    assert facts["sleep_used_each"] == "2.50, 7.25"
    text = incident.causes[0].explanation
    assert "freed 60.00 GiB; 7.25 GiB of the device stayed in use" in text
    assert "In use after each sleep: 2.50, 7.25 GiB." in text
    assert "It needs 58.00 GiB to wake up" in text


def test_what_must_have_been_taken_follows_from_the_devices_size():
    started = (
        CORE
        + "INFO 11-14 15:00:23 [gpu_worker.py:789] Free memory on device (79.05/79.25 GiB) on startup. Desired GPU memory utilization is"
        " (0.8, 63.40 GiB). Actual usage is 15.0 GiB for weight, 2.2 GiB for peak activation, 0.1 GiB for non-torch memory, and 0.5 GiB for"
        " CUDAGraph memory."
    )
    incident = one(started, slept(60, 2.25), CORE + CUMEM)
    assert (
        "other allocations took at least 17.00 GiB while it slept" in incident.causes[0].explanation
    )


@pytest.mark.parametrize(
    "log",
    [
        [
            TRACEBACK,
            '  File "/verl/workers/sharding_manager/fsdp_vllm.py", line 79, in __enter__',
            *FRAMES,
            f"RuntimeError: {CUMEM}",
        ],
        [
            TRACEBACK,
            '  File "/opt/acme/transformers/trainer.py", line 2328, in train',
            '  File "/opt/acme/trl/trainer/grpo_trainer.py", line 841, in _prepare_inputs',
            *FRAMES,
            f"RuntimeError: {CUMEM}",
        ],
        [
            "(ActorModelRayActor pid=4000) " + line
            for line in (TRACEBACK, *FRAMES, f"RuntimeError: {CUMEM}")
        ],
        [
            "(WorkerDict pid=7) [torch_memory_saver.cpp] cudaError error: 2 (out of memory)  file=csrc/core.cpp func=resume line=172"
        ],
    ],
    ids=["verl", "trl", "openrlhf", "slime"],
)
def test_a_trainer_that_wakes_the_engine_holds_the_memory(log):
    assert first(one(*log)) == ("wake_up", "sleep_wake", "OG387")


def test_another_process_holds_the_memory():
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.00 GiB is"
        " free. Process 900 has 70.00 GiB memory in use. Including non-PyTorch memory, this process has 8.20 GiB memory in use. Of the"
        " allocated memory 6.00 GiB is allocated by PyTorch, and 220.00 MiB is reserved by PyTorch but unallocated."
    )
    incident = one(
        slept(60, 2.25),
        *(CORE + line for line in (TRACEBACK, FRAMES[0], "    buffer.data.copy_(saved)", message)),
    )
    assert first(incident) == ("wake_up", "sleep_wake", "OG388")
    assert "other processes used 70.05 GiB of 79.25 GiB" in incident.causes[0].explanation
    assert [(patch.setting, patch.new) for patch in incident.plan] == [
        ("gpu_memory_utilization", None)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/utils.h func=cu_mem_create line=194",
        "[torch_memory_saver.cpp] CUresult error  result=2 file=csrc/torch_memory_saver.cpp func=cu_mem_create line=103",
    ],
)
def test_sglang_resumes(text):
    resumed = '[2026-03-01 06:01:00 TP0]   File "/sgl/srt/managers/scheduler_update_weights_mixin.py", line 141, in resume_memory_occupation'
    incident = one(resumed, text)
    assert (incident.framework, first(incident)) == ("sglang", ("wake_up", "sleep_wake", "OG389"))
    assert [patch.setting for patch in incident.plan] == ["mem_fraction_static"]
    assert one(text).phase == "kv_cache_init"


def test_an_allocator_that_only_tries_again_reports_no_failure():
    text = "[torch_memory_saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue e.g. torch allocator will free cache and retry)"
    assert diagnose(text).incidents == ()


def test_sleeping_and_waking_in_good_order_reports_no_failure():
    log = [
        slept(60, 2.5),
        CORE + "INFO 11-14 15:11:29 [abstract.py:324] It took 0.612 seconds to wake up.",
        '(APIServer pid=30) INFO:     10.1.0.4:50356 - "POST /wake_up HTTP/1.1" 200 OK',
    ]
    assert diagnose("\n".join(log)).incidents == ()
