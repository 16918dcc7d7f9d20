"""A server that ends with status 0 however it ended, in vLLM 0.32's words; ``--mode`` says what happens to its engine.

With a share of at most ``--fits`` of the card it serves and ends in good order. The share comes from
--gpu-memory-utilization, or from the overrides that the plugin would apply.
"""

import argparse
import json
import os

parser = argparse.ArgumentParser()
parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
parser.add_argument("--fits", type=float, default=0.86)
parser.add_argument("--mode", default="full")
parser.add_argument("--count", default="")
args = parser.parse_args()
overrides = json.loads(os.environ.get("OOMGUARD_VLLM_OVERRIDES", "{}"))
share = overrides.get("gpu_memory_utilization", args.gpu_memory_utilization)
if args.count:
    with open(args.count, "a") as file:
        file.write(f"{share}\n")

API = "(APIServer pid=1) "
CORE = "(EngineCore pid=2) "
OTHER = "(EngineCore pid=9) "
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which"
    " 512.00 MiB is free. Including non-PyTorch memory, this process has 23.10 GiB memory in use. Of the allocated memory"
    " 22.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
)


def start(core: str) -> list[str]:
    return [
        f"{API}INFO 11-22 04:20:27 [api_utils.py:286] non-default args: {{'model': './none', 'gpu_memory_utilization': {share}}}",
        f"{core}INFO 11-22 04:20:47 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='./none', dtype=torch.float16, max_seq_len=8192, tensor_parallel_size=1, quantization=None",
        f"{core}INFO 11-22 04:21:20 [kv_cache_utils.py:2327] GPU KV cache size: 97,648 tokens, Maximum concurrency for 8,192 tokens per request: 11.92x",
        "INFO:     Application startup complete.",
    ]


FRONT = [
    f"{API}ERROR 11-22 04:21:38 [async_llm.py:906] AsyncLLM output_handler failed.",
    f"{API}ERROR 11-22 04:21:38 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
]
CLOSED = [
    "INFO:     Shutting down",
    "INFO:     Application shutdown complete.",
    "INFO:     Finished server process [1]",
]
FULL = [
    f"{CORE}ERROR 11-22 04:21:38 [core.py:1512] EngineCore encountered a fatal error.",
    f"{CORE}ERROR 11-22 04:21:38 [core.py:1512] Traceback (most recent call last):",
    f'{CORE}ERROR 11-22 04:21:38 [core.py:1512]   File "/env/vllm/v1/worker/gpu_model_runner.py", line 3127, in execute_model',
    f"{CORE}ERROR 11-22 04:21:38 [core.py:1512] {OUT_OF_MEMORY}",
    *FRONT,
]
WORKER = [
    f"{CORE}ERROR 11-22 04:21:38 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor.",
    f"{CORE}INFO 11-22 04:21:38 [multiproc_executor.py:486] [shutdown] Executor: all workers exited gracefully",
    f"{CORE}ERROR 11-22 04:21:38 [core.py:1512] EngineCore encountered a fatal error.",
    f"{CORE}ERROR 11-22 04:21:38 [core.py:1512] RuntimeError: Executor failed.",
    *FRONT,
]
GONE = "WARNING 11-22 04:24:34 [core_client.py:817] [shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
CLEANUP = (
    f"{API}INFO 11-22 04:24:34 [core_client.py:770] [shutdown] MPClient: start timeout=default"
)
GRACEFUL = f"{CORE}INFO 11-22 04:24:34 [multiproc_executor.py:486] [shutdown] Executor: all workers exited gracefully"
TOLD = f"{API}INFO 11-22 04:24:34 [launcher.py:254] [shutdown] API server: shutdown triggered"
REQUEST = [
    f"{API}ERROR 11-22 04:21:38 [serving.py:300] Error in preprocessing prompt inputs",
    f"{API}ERROR 11-22 04:21:38 [serving.py:300] {OUT_OF_MEMORY}",
    'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error',
    'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK',
]
OLD_END = "ERROR 01-16 17:16:49 [core_client.py:605] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client."
START_FAILED = [
    f"{OTHER}ERROR 11-22 04:12:40 [core.py:1510] EngineCore failed to start.",
    f"{OTHER}ERROR 11-22 04:12:40 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: 0), shutting down executor.",
]
DEATHS = {
    "full": FULL,
    "worker": WORKER,
    "killed": [f"{API}{GONE}", CLEANUP, *FRONT],
    "start": [
        *START_FAILED,
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ],
    "old server": [f"{API}{OLD_END}"],
    "oldest": [
        "CRITICAL 11-05 12:03:03 launcher.py:99] MQLLMEngine is already dead, terminating server process"
    ],
}
HEALTHY = {
    "ended": [GRACEFUL, GONE],
    "ended server": [GRACEFUL, f"{API}{GONE}"],
    "told": [TOLD, f"{API}{GONE}", *FRONT],
    "told both": [f"{API}{GONE}", TOLD],
    "old script": [OLD_END],
    "bare script": [GONE],
    "failed request": [*REQUEST, TOLD],
    "started again": [*FULL, *start(OTHER), GRACEFUL],
    "handled": [*START_FAILED, "it does not fit: going on without"],
}
happens = ["RESULT"] if share <= args.fits else {**DEATHS, **HEALTHY}[args.mode]
for line in [*start(CORE), *happens, *CLOSED]:
    print(line, flush=True)
