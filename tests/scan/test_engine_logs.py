"""Whole logs of engines: what the user set and what the engine set itself, whose lines are whose, what is only supposed."""

from __future__ import annotations

import json

import pytest

from oomguard import diagnose
from oomguard.core.incident import Incident

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


def test_profiling_blocks_change_nothing():
    profiled, plain = (
        only(SERVING.replace("PROFILED", PROFILED)),
        only(SERVING.replace("PROFILED\n", "")),
    )
    assert without_lines(profiled) == without_lines(plain)
    assert profiled.plan[0].setting == "gpu_memory_utilization"
    assert profiled.plan[0].new < 0.94


@pytest.mark.parametrize(
    ("listed", "cause"),
    [(", 'num_gpu_blocks_override': 96", "kv_blocks_override"), ("", "max_model_len_too_large")],
)
def test_blocks_outside_complete_settings_are_not_the_users(listed, cause):
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
def test_kill_without_a_kernel_record_stays_below_0_7(text, most):
    assert only(text).causes[0].confidence == most


def test_no_cause_of_an_unknown_wording_is_stated_above_0_7():
    incident = only(
        'Traceback (most recent call last):\n  File "serve.py", line 7, in step\n    pool.take(rows)\n'
        "acme.HostPoolError: the host pool is out of memory"
    )
    assert incident.certainty_ratio is not None
    assert max(cause.confidence for cause in incident.causes) == 0.7


def of_services(column: str, first: str, second: str) -> str:
    """Return a healthy start of one service and the failed start of another, whose engines have the same number."""
    core = "(EngineCore_DP0 pid=31)"
    lines = [
        (
            first,
            f"{core} INFO 05-02 07:00:10 [gpu_model_runner.py:4344] Model loading took 8.00 GiB memory and 4.000000 seconds",
        ),
        (
            first,
            f"{core} INFO 05-02 07:00:40 [gpu_worker.py:424] Available KV cache memory: 2.50 GiB",
        ),
        (
            first,
            f"{core} INFO 05-02 07:00:40 [kv_cache_utils.py:1314] GPU KV cache size: 40,960 tokens",
        ),
        (
            second,
            f"{core} INFO 05-02 07:01:10 [gpu_model_runner.py:4344] Model loading took 2.75 GiB memory and 6.000000 seconds",
        ),
        (
            first,
            f"{core} INFO 05-02 07:01:12 [gpu_model_runner.py:5366] Graph capturing finished in 3 secs, took 0.40 GiB",
        ),
        (
            second,
            f"{core} INFO 05-02 07:01:50 [gpu_worker.py:424] Available KV cache memory: -3.25 GiB",
        ),
        (
            second,
            f"{core} ERROR 05-02 07:01:50 [core.py:1100] ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        ),
    ]
    return "".join(column.format(name) + text + "\n" for name, text in lines)


@pytest.mark.parametrize("column", ["{:<8}| ", "[pod/{}/engine] ", "{}.1.x9k@node-4    | "])
def test_services_with_the_same_process_numbers_are_kept_apart(column):
    diagnosis = diagnose(of_services(column, "chat", "embed"))
    (incident,) = diagnosis.incidents
    figures = {name for name in incident.facts if name.endswith(("_bytes", "_tokens"))}
    assert figures == {"model_weights_bytes", "kv_cache_available_bytes"}
    assert incident.facts["kv_cache_available_bytes"].value < 0
    assert "embed" in str(incident.location.process)
    assert [set(start.facts) & {"cudagraph_bytes"} for start in diagnosis.starts] == [
        {"cudagraph_bytes"},
        set(),
    ]


@pytest.mark.parametrize("about", ['"kubernetes": {{"pod_name": "{}"}}', '"container_name": "/{}"'])
def test_a_collector_s_pods_and_containers_are_kept_apart(about):
    log = of_services("{}\t", "chat", "embed")
    rows = [line.partition("\t") for line in log.splitlines()]
    objects = [
        f'{{{{"log": {json.dumps(text)}, "stream": "stderr", {about}}}}}'.format(name)
        for name, _, text in rows
    ]
    incident = only("\n".join(objects))
    assert "cudagraph_bytes" not in incident.facts
    assert "embed" in str(incident.location.process)


def test_one_service_alone_is_not_named():
    incident = only(
        "".join(
            f"vllm-1  | {line}\n" for line in SERVING.replace("PROFILED", PROFILED).splitlines()
        )
    )
    assert incident.location.process == "EngineCore pid=77"
    assert incident.facts["kv_cache_capacity_tokens"].value == 55680


FRAMES = """\
Traceback (most recent call last):
  File "/app/run.py", line 4, in <module>
    out = model.generate(**batch)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {gib} GiB. GPU 0 has a total capacity of 23.60 GiB of which 500.00 MiB is free. Including non-PyTorch memory, this process has 23.00 GiB memory in use."""


def test_interleaved_messages_of_two_services_are_read_whole():
    one, two = FRAMES.format(gib="1.25").splitlines(), FRAMES.format(gib="2.75").splitlines()
    log = "".join(
        f"alpha  | {a}\nbeta   | {b}\n"
        for a, b in zip(
            ["INFO 05-02 07:00:00 [a.py:1] on", *one],
            ["INFO 05-02 07:00:00 [a.py:1] on", *two],
            strict=True,
        )
    )
    incidents = diagnose(log).incidents
    assert [
        (one.location.process, one.facts["tried_bytes"].value / 2**30) for one in incidents
    ] == [
        ("alpha", 1.25),
        ("beta", 2.75),
    ]


def test_a_client_in_another_container_passes_the_failure_on():
    log = (
        of_services("{:<8}| ", "chat", "embed")
        + "webui   | INFO 05-02 07:01:52 [app.py:9] got: ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`\n"
    )
    assert len(diagnose(log).incidents) == 1


def rank(label: str, gpu: int, free: str) -> str:
    return (
        f"[2026-02-03 05:00:00{label}] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/opt/sglang/srt/model_executor/model_runner.py", line 640, in load_model\n'
        "    self.model = get_model(\n"
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.00 GiB. GPU {gpu} has a total capacity of 79.20 GiB of which"
        f" {free} GiB is free. Process {700 + gpu} has 76.00 GiB memory in use. Of the allocated memory 74.00 GiB is allocated by PyTorch,"
        " and 10.00 MiB is reserved by PyTorch but unallocated.\n\n"
    )


def test_one_failure_of_several_ranks_has_the_firsts_figures():
    log = (
        (
            "[2026-02-03 04:59:00 TP1] Load weight begin. avail mem=78.10 GB\n"
            "[2026-02-03 04:59:00 TP6] Load weight begin. avail mem=77.30 GB\n"
            "[2026-02-03 04:59:00 TP0] max_total_num_tokens=90000, context_len=8192, available_gpu_mem=3.00 GB\n"
        )
        + rank(" TP6", 6, "2.90")
        + rank(" TP1", 1, "2.95")
    )
    incident = only(log)
    assert (incident.location.process, incident.also_in, incident.repeated) == ("TP6", ("TP1",), 2)
    facts = {name: fact.value for name, fact in incident.facts.items()}
    assert facts["gpu_index"] == 6
    assert facts["initial_free_bytes"] == round(77.3 * 2**30)
    assert facts["kv_cache_capacity_tokens"] == 90000
    assert "current_free_bytes" not in facts


def test_ranks_that_no_line_names_are_known_by_their_devices():
    incident = only(rank("", 3, "2.90") + rank("", 5, "2.95"))
    assert (incident.also_in, incident.facts["gpu_index"].value) == (("GPU 5",), 3)


def test_share_too_large_for_ranks_must_fit_the_fullest_device():
    fails = "(Worker_TP{} pid={}) ValueError: Free memory on device cuda:{} ({}/47.5 GiB) on startup is less than desired GPU memory utilization (0.9, 42.75 GiB). Decrease GPU memory utilization"
    incident = only(fails.format(0, 50, 0, "30.5") + "\n" + fails.format(1, 51, 1, "28.25") + "\n")
    assert incident.facts["device_free_bytes"].value == 28.25 * 2**30
    assert incident.also_in == ("Worker_TP1 pid=51",)


CALL = """\
Traceback (most recent call last):
  File "/app/serve.py", line 19, in answer
    out = model.generate(**inputs)
"""
WHOLE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 44.40 GiB of which 61.50 MiB"
    " is free. Including non-PyTorch memory, this process has 44.30 GiB memory in use. Of the allocated memory 43.10 GiB is allocated by"
    " PyTorch, and 210.00 MiB is reserved by PyTorch but unallocated."
)
LENGTH = (
    "ValueError: To serve at least one request with the model's max seq len (24576), (3.00 GiB KV cache is needed, which is larger than"
    " the available KV cache memory (1.50 GiB). Based on the available memory, the estimated maximum model length is 12288."
)


@pytest.mark.parametrize("length", [48, 70, 85, 100, 120, 160, 210, 300])
def test_log_cut_inside_the_message_keeps_its_whole_figures(length):
    whole, cut = only(CALL + WHOLE), only(CALL + WHOLE[:length])
    assert (cut.kind, cut.phase) == (whole.kind, whole.phase)
    figures = (
        "tried_bytes",
        "device_total_bytes",
        "device_free_bytes",
        "process_in_use_bytes",
        "allocated_bytes",
    )
    assert all(
        cut.facts[name].value == whole.facts[name].value for name in figures if name in cut.facts
    )


@pytest.mark.parametrize("begin", [25, 45, 80, 110, 140, 180, 230])
def test_a_log_that_begins_amid_the_message_is_one_failure(begin):
    assert only(WHOLE[begin:] + "\n").kind == "cuda_oom"


@pytest.mark.parametrize(
    "part", [slice(70), slice(84), slice(110), slice(60, None), slice(120, None), slice(190, None)]
)
def test_a_start_whose_message_is_cut_is_one_failure(part):
    incident = only("(EngineCore pid=7) " + LENGTH[part])
    assert incident.kind == "kv_cache_too_small_for_max_len"
    assert (
        incident.facts.get("max_model_len_tokens") is None
        or incident.facts["max_model_len_tokens"].value == 24576
    )


@pytest.mark.parametrize(
    "text",
    [
        "torch.OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: CUDA error: out of memory",
        "torch.cuda.OutOfMemoryError:",
    ],
)
def test_a_message_without_figures_is_one_failure(text):
    assert only(CALL + text).facts.keys().isdisjoint({"tried_bytes", "device_total_bytes"})


def escaped(text: str) -> str:
    return json.dumps(text)


WRAPPED = {
    "a logger's object": '{"level":"error","ts":1764000000.5,"msg":"call failed","error":'
    + escaped(CALL + WHOLE)
    + "}",
    "an answer": '{"detail":' + escaped(CALL + WHOLE) + "}",
    "an answer within an answer": '{"status":500,"body":'
    + escaped('{"error":' + escaped(CALL + WHOLE) + "}")
    + "}",
    "Go": "2026/05/05 09:00:00 rpc error: code = Internal desc = Exception calling application: "
    + WHOLE,
    "Java": (
        f"io.grpc.StatusRuntimeException: UNKNOWN: Exception calling application: {WHOLE}\n"
        "\tat io.grpc.stub.ClientCalls.toStatusRuntimeException(ClientCalls.java:271)\n"
        f"Caused by: java.io.IOException: the server said: {WHOLE}\n\t... 3 more"
    ),
    "Rust": (
        "thread 'main' panicked at src/main.rs:9:5:\ncalled `Result::unwrap()` on an `Err` value: PyErr { type: <class"
        f" 'torch.OutOfMemoryError'>, value: OutOfMemoryError('{WHOLE.partition(': ')[2]}'), traceback: Some(..) }}"
    ),
    "JavaScript": f'Error: 500 {{"error":{{"message":"{WHOLE}"}}}}\n    at APIError.generate (/app/node_modules/openai/error.js:69:20)',
}


@pytest.mark.parametrize("text", WRAPPED.values(), ids=WRAPPED)
def test_failure_in_another_languages_wrapper_is_one_incident(text):
    incident = only(text + "\n")
    assert incident.kind == "cuda_oom"
    assert incident.facts["tried_bytes"].value == 96 * 2**20
    assert incident.facts["device_free_bytes"].value == 61.5 * 2**20


def test_interleaved_lines_of_two_processes_are_read_whole():
    lines = (CALL + WHOLE).splitlines()
    incident = only("".join(f"[rank{rank}]: {line}\n" for line in lines for rank in range(2)))
    assert (incident.also_in, incident.phase, incident.facts["tried_bytes"].value) == (
        ("rank1",),
        "generate",
        96 * 2**20,
    )
