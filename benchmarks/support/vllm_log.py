# The lines of a log are as long as they are.
"""A made log of a vLLM service that works for months, with three incidents: the input of the
throughput figures.
"""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

VERSION = 1  # of the made log: raised when its content changes
LINES_PER_START = 50_000
FOLDER = Path(tempfile.gettempdir()) / "oomguard-throughput"

INCIDENTS = (
    (
        0.10,
        "cuda_oom",
        """\
(EngineCore pid={pid}) ERROR {when} [core.py:842] EngineCore encountered a fatal error.
(EngineCore pid={pid}) ERROR {when} [core.py:842] Traceback (most recent call last):
(EngineCore pid={pid}) ERROR {when} [core.py:842]   File "/opt/venv/lib/python3.12/site-packages/vllm/v1/engine/core.py", line 833, in run_engine_core
(EngineCore pid={pid}) ERROR {when} [core.py:842]     engine_core.run_busy_loop()
(EngineCore pid={pid}) ERROR {when} [core.py:842]   File "/opt/venv/lib/python3.12/site-packages/vllm/v1/worker/gpu_model_runner.py", line 2955, in _get_prompt_logprobs_dict
(EngineCore pid={pid}) ERROR {when} [core.py:842]     logprobs = self.sampler.compute_logprobs(logits)
(EngineCore pid={pid}) ERROR {when} [core.py:842] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.63 GiB. GPU 0 has a total capacity of 79.25 GiB of which 2.11 GiB is free. Including non-PyTorch memory, this process has 77.13 GiB memory in use. Of the allocated memory 74.20 GiB is allocated by PyTorch, with 1.12 GiB allocated in private pools (e.g., CUDA Graphs), and 811.20 MiB is reserved by PyTorch but unallocated.
(APIServer pid=1) ERROR {when} [async_llm.py:687] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
""",
    ),
    (
        0.50,
        "kv_cache_too_small_for_max_len",
        """\
(EngineCore pid={pid}) ERROR {when} [core.py:842] EngineCore failed to start.
(EngineCore pid={pid}) ERROR {when} [core.py:842] Traceback (most recent call last):
(EngineCore pid={pid}) ERROR {when} [core.py:842] ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which is larger than the available KV cache memory (11.42 GiB). Based on the available memory, the estimated maximum model length is 93520. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore': 1}}
""",
    ),
    (
        0.97,
        "startup_free_memory_below_utilization",
        """\
(EngineCore pid={pid}) ERROR {when} [core.py:842] EngineCore failed to start.
(EngineCore pid={pid}) ERROR {when} [core.py:842] ValueError: Free memory on device cuda:0 (20.11/79.25 GiB) on startup is less than desired GPU memory utilization (0.92, 72.91 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.
""",
    ),
)


def start_up(rng: random.Random, when: str, pid: int) -> str:
    core = f"(EngineCore pid={pid}) INFO {when}"
    length = rng.choice((8192, 32768, 131072))
    weights = rng.uniform(14, 40)
    pool = rng.uniform(5, 30)
    tokens = int(pool * 2**30 / 131072)
    return (
        f"(APIServer pid=1) INFO {when} [utils.py:253] non-default args: {{'model': "
        f"'org/model-{rng.randrange(99)}b', 'max_model_len': {length}, 'gpu_memory_utilization': "
        f"0.9{rng.randrange(9)}}}\n"
        f"(APIServer pid=1) INFO {when} [model.py:1510] Using max model len {length}\n"
        f"(APIServer pid=1) INFO {when} [scheduler.py:205] Chunked prefill is enabled with "
        "max_num_batched_tokens=8192.\n"
        f"{core} [core.py:77] Initializing a V1 LLM engine (v0.32.0) with config: "
        f"model='org/model', speculative_config=None, dtype=torch.bfloat16, max_seq_len={length}, "
        "tensor_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto, "
        f"seed={rng.randrange(9)}\n"
        f"{core} [gpu_model_runner.py:3338] Model loading took {weights:.4f} GiB and "
        f"{rng.uniform(3, 60):.6f} seconds\n"
        f"{core} [backends.py:559] Dynamo bytecode transform time: {rng.uniform(4, 12):.2f} s\n"
        f"{core} [monitor.py:34] torch.compile takes {rng.uniform(14, 40):.2f} s in total\n"
        f"{core} [gpu_worker.py:298] Available KV cache memory: {pool:.2f} GiB\n"
        f"{core} [kv_cache_utils.py:1229] GPU KV cache size: {tokens:,} tokens\n"
        f"{core} [kv_cache_utils.py:1234] Maximum concurrency for {length:,} tokens per request: "
        f"{tokens / length:.2f}x\n"
        f"{core} [gpu_worker.py:391] Free memory on device ({rng.uniform(70, 79):.2f}/79.25 GiB) "
        "on startup. Desired GPU memory utilization is (0.92, 72.91 GiB). Actual usage is "
        f"{weights:.2f} GiB for weight, 2.11 GiB for peak activation, 0.06 GiB for non-torch "
        "memory, and 0.83 GiB for CUDAGraph memory.\n"
        f"{core} [gpu_model_runner.py:4244] Graph capturing finished in {rng.randrange(5, 40)} "
        f"secs, took {rng.uniform(0.3, 2):.2f} GiB\n"
        f"{core} [core.py:250] init engine (profile, create kv cache, warmup model) took "
        f"{rng.uniform(20, 90):.2f} seconds\n"
        "(APIServer pid=1) INFO:     Application startup complete.\n"
    )


def healthy(seed: int) -> Iterator[str]:
    """Lines of a service at work without end: statistics, accesses, requests, now and then a
    warning or a new start.
    """
    rng = random.Random(seed)
    pick = rng.random
    pid = 300
    second = 0
    for n in range(10**12):
        second += n % 7 == 0
        when = (
            f"{1 + second // 2592000 % 12:02d}-{1 + second // 86400 % 28:02d} "
            f"{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        )
        if n % LINES_PER_START == 0:
            pid = rng.randrange(100, 99999)
            yield start_up(rng, when, pid)
        x = pick()
        y = pick()
        if x < 0.55:
            if y < 0.8:
                path = "/v1/chat/completions"
            elif y < 0.9:
                path = "/v1/completions"
            elif y < 0.97:
                path = "/health"
            else:
                path = "/metrics"
            yield (
                "(APIServer pid=1) INFO:     "
                f"10.{int(256 * y)}.{int(65536 * y) % 256}.{n % 256}:{32768 + n * 7919 % 28000} - "
                f'"{"GET" if y > 0.9 else "POST"} {path} HTTP/1.1" 200 OK\n'
            )
        elif x < 0.75:
            yield (
                f"(APIServer pid=1) INFO {when} [loggers.py:127] Engine 000: Avg prompt "
                f"throughput: {9000 * y:.1f} tokens/s, Avg generation throughput: "
                f"{4000 * x * y:.1f} tokens/s, Running: {int(256 * y)} reqs, Waiting: "
                f"{int(40 * y)} reqs, GPU KV cache usage: {100 * y:.1f}%, Prefix cache hit rate: "
                f"{90 * x:.1f}%\n"
            )
        elif x < 0.95:
            yield (
                f"(APIServer pid=1) INFO {when} [logger.py:47] Received request "
                f"chatcmpl-{int(2**64 * y):016x}{n:012x}: params: SamplingParams(n=1, "
                "presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, "
                f"temperature={y:.2f}, top_p={x:.2f}, top_k=0, min_p=0.0, seed=None, stop=[], "
                f"max_tokens={int(4096 * y)}, min_tokens=0, logprobs=None, prompt_logprobs=None, "
                "skip_special_tokens=True), lora_request: None.\n"
            )
        elif x < 0.98:
            yield (
                f"(EngineCore pid={pid}) DEBUG {when} [core.py:{500 + n % 300}] EngineCore loop "
                f"active, step {n}, batch {int(256 * y)}\n"
            )
        elif x < 0.995:
            yield (
                f"(APIServer pid=1) WARNING {when} [protocol.py:93] The following fields were "
                f"present in the request but ignored: {{'user_{n}'}}\n"
            )
        else:
            yield (
                f'(APIServer pid=1) INFO:     10.0.0.{n % 256}:{32768 + n % 28000} - "POST '
                '/v1/chat/completions HTTP/1.1" 400 Bad Request\n'
            )


def make_log(size_bytes: int) -> Path:
    """The log of this size, made where it is not there yet."""
    path = FOLDER / f"vllm-{size_bytes}-v{VERSION}.log"
    if path.is_file() and path.stat().st_size >= size_bytes:
        return path
    FOLDER.mkdir(exist_ok=True)
    waiting = [(int(share * size_bytes), text) for share, _, text in INCIDENTS]
    written = 0
    chunk = []
    length = 0
    new = path.with_suffix(".new")
    with new.open("w", encoding="ascii", newline="\n") as out:
        for line in healthy(seed=3):
            chunk.append(line)
            length += len(line)
            if waiting and written + length >= waiting[0][0]:
                text = waiting.pop(0)[1].format(pid=4711, when="06-01 12:00:00")
                chunk.append(text)
                length += len(text)
            if length >= 1 << 20:
                written += out.write("".join(chunk))
                chunk = []
                length = 0
                if written >= size_bytes:
                    break
    return new.replace(path)
