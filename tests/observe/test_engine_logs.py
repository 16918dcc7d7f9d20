"""Whole logs of engines: what the user set and what the engine set itself, whose lines are whose, what is only supposed."""

from __future__ import annotations

import pytest

from oomguard import diagnose
from oomguard.incident import Incident

PROFILED = "(EngineCore pid=77) INFO 04-12 09:30:05 [kv_cache_utils.py:829] Overriding num_gpu_blocks=0 with num_gpu_blocks_override=128"
SERVING = """\
(APIServer pid=3) INFO 04-12 09:29:00 [utils.py:253] non-default args: {'model': 'acme/m-7b', 'gpu_memory_utilization': 0.94}
(EngineCore pid=77) INFO 04-12 09:29:50 [gpu_model_runner.py:4837] Model loading took 13.60 GiB memory and 7.000000 seconds
PROFILED
(EngineCore pid=77) INFO 04-12 09:30:06 [gpu_model_runner.py:5916] Profiling CUDA graph memory: PIECEWISE=21 (largest=256), FULL=11 (largest=128)
(EngineCore pid=77) INFO 04-12 09:30:09 [gpu_worker.py:436] Available KV cache memory: 6.80 GiB
(EngineCore pid=77) INFO 04-12 09:30:09 [kv_cache_utils.py:1314] GPU KV cache size: 55,680 tokens
(APIServer pid=3) INFO:     Application startup complete.
(EngineCore pid=77) ERROR 04-12 10:00:00 [core.py:1100] EngineCore encountered a fatal error.
(EngineCore pid=77) ERROR 04-12 10:00:00 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=77) ERROR 04-12 10:00:00 [core.py:1100]   File "/opt/vllm/v1/worker/gpu_model_runner.py", line 3500, in execute_model
(EngineCore pid=77) ERROR 04-12 10:00:00 [core.py:1100]     logits = self.model.compute_logits(sample_hidden_states)
(EngineCore pid=77) ERROR 04-12 10:00:00 [core.py:1100] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.10 GiB. GPU 0 has a total capacity of 23.60 GiB of which 280.00 MiB is free. Including non-PyTorch memory, this process has 23.30 GiB memory in use. Of the allocated memory 22.20 GiB is allocated by PyTorch, and 190.00 MiB is reserved by PyTorch but unallocated.
"""


def only(text: str) -> Incident:
    (incident,) = diagnose(text).incidents
    return incident


def without_lines(incident: Incident) -> tuple[object, ...]:
    facts = {name: fact.value for name, fact in incident.facts.items()}
    plan = [(patch.setting, patch.old, patch.new) for patch in incident.plan]
    return incident.kind, incident.phase, facts, [cause.id for cause in incident.causes], plan


def test_the_blocks_with_which_the_engine_profiles_change_nothing():
    profiled, plain = only(SERVING.replace("PROFILED", PROFILED)), only(SERVING.replace("PROFILED\n", ""))
    assert without_lines(profiled) == without_lines(plain)
    assert profiled.plan[0].setting == "gpu_memory_utilization"
    assert profiled.plan[0].new < 0.94


@pytest.mark.parametrize(
    ("listed", "cause"), [(", 'num_gpu_blocks_override': 96", "kv_blocks_override"), ("", "max_model_len_too_large")]
)
def test_blocks_that_are_not_among_the_complete_settings_are_not_the_user_s(listed, cause):
    incident = only(
        f"INFO 04-12 09:29:00 [utils.py:253] non-default args: {{'model': 'acme/m', 'max_model_len': 49152{listed}}}\n"
        "(EngineCore pid=8) INFO 04-12 09:30:00 [kv_cache_utils.py:829] Overriding num_gpu_blocks=9000 with num_gpu_blocks_override=96\n"
        "(EngineCore pid=8) ValueError: To serve at least one request with the models's max seq len (49152), (6.00 GiB KV cache is"
        " needed, which is larger than the available KV cache memory (0.19 GiB). Based on the available memory, the estimated"
        " maximum model length is 1536. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`."
    )
    assert incident.causes[0].id == cause


def test_the_engine_process_of_v0_is_vllm_s_while_it_serves():
    incident = only(
        "CRITICAL 06-01 08:00:01 [launcher.py:116] MQLLMEngine is already dead, terminating server process\n"
        'INFO:     10.1.1.1:50000 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n'
        "ERROR 06-01 08:00:01 [engine.py:160] OutOfMemoryError('CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total"
        " capacity of 47.40 GiB of which 1.10 GiB is free. Process 41 has 46.20 GiB memory in use. Of the allocated memory 44.00 GiB is"
        " allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated.')\n"
        "ERROR 06-01 08:00:01 [engine.py:160] Traceback (most recent call last):\n"
        'ERROR 06-01 08:00:01 [engine.py:160]   File "/opt/vllm/engine/multiprocessing/engine.py", line 158, in start\n'
        "ERROR 06-01 08:00:01 [engine.py:160]     self.run_engine_loop()\n"
    )
    assert (incident.framework, incident.phase) == ("vllm", "decode")
    assert incident.plan


RAY = (
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker PID: 9 Worker exit type: SYSTEM_ERROR"
    " Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. There are some potential root causes."
    " (1) The process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called.\n"
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
)
ABORTED = "(RayWorkerWrapper pid=9, ip=10.3.0.1) Fatal Python error: Aborted\n"


@pytest.mark.parametrize("text", [RAY, ABORTED + RAY])
def test_what_ray_supposes_of_a_dead_worker_is_no_memory_failure(text):
    incidents = diagnose(text).incidents
    assert not any(incident.is_oom for incident in incidents)
    assert not any(cause.id == "host_ram" for incident in incidents for cause in incident.causes)


LOADING = "Loading checkpoint shards:  40%|####      | 2/5 [00:08<00:12,  4.00s/it]\nKilled\n"
KERNEL = "[ 81.5] Out of memory: Killed process 641 (python) total-vm:51000000kB, anon-rss:29000000kB, file-rss:1024kB, shmem-rss:0kB\n"


@pytest.mark.parametrize(
    ("text", "most"),
    [(LOADING, 0.7), (LOADING + KERNEL, 0.99), (KERNEL + LOADING, 0.99)],
    ids=["alone", "kernel", "before"],
)
def test_a_kill_without_the_kernel_s_word_is_not_stated_above_0_7(text, most):
    assert only(text).causes[0].confidence == most


def test_no_cause_of_an_unknown_wording_is_stated_above_0_7():
    incident = only(
        'Traceback (most recent call last):\n  File "serve.py", line 7, in step\n    pool.take(rows)\n'
        "acme.HostPoolError: the host pool is out of memory"
    )
    assert incident.certainty_ratio is not None
    assert max(cause.confidence for cause in incident.causes) == 0.7
