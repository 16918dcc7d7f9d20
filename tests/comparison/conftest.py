"""Logs of starts in the engines' own words: what the comparison is tried on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from oomguard.comparison import ComparedStart, Comparison, compare, compared_start
from oomguard.diagnosis import diagnose

_ECHO = "INFO 01-15 09:12:01 [utils.py:253] non-default args: {{'model': 'org/m', 'max_model_len': {length}{more}}}\n"
_START = (
    "INFO 01-15 09:12:18 [core.py:93] Initializing a V1 LLM engine (v{version}) with config: model='org/m', dtype={dtype}, "
    "max_seq_len={length}, tensor_parallel_size={ranks}, quantization=None, enforce_eager={eager}, kv_cache_dtype=auto, device_config=cuda\n"
)
_SUMMARY = (
    "INFO 01-15 09:13:06 [gpu_worker.py:464] Free memory on device ({free}/{total} GiB) on startup. Desired GPU memory utilization is "
    "({share}, {desired} GiB). Actual usage is {weights} GiB for weight, {activations} GiB for peak activation, 0.25 GiB for non-torch "
    "memory, and {graphs} GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=4455325696`\n"
)
_TOO_SMALL = (
    "ERROR 01-15 09:14:57 [core.py:1108] ValueError: To serve at least one request with the models's max seq len ({length}), ({need} GiB KV "
    "cache is needed, which is larger than the available KV cache memory ({pool} GiB). Based on the available memory, the estimated "
    "maximum model length is 100. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.\n"
)


def vllm_log(**given: object) -> str:
    """The log of one vLLM start; ``fails`` ends it at the KV cache, ``echo=False`` leaves out the list of settings."""
    values = {
        "version": "0.12.0",
        "dtype": "torch.bfloat16",
        "length": 32768,
        "ranks": 1,
        "eager": False,
        "free": "23.25",
        "total": "23.64",
        "share": 0.9,
        "desired": "21.28",
        "weights": "15.00",
        "activations": "1.25",
        "graphs": "0.50",
        "pool": "4.75",
        "need": "4.0",
        "more": "",
        **given,
    }
    text = _ECHO.format(**values) if given.get("echo", True) else ""
    text += (
        _START.format(**values)
        + "INFO [gpu_model_runner.py:3549] Model loading took {weights} GiB memory and 5.2 seconds\n".format(
            **values
        )
    )
    if given.get("fails") and given.get("graphs"):
        text += "INFO [gpu_model_runner.py:5955] Estimated CUDA graph memory: {graphs} GiB total\n".format(
            **values
        )
    text += "INFO [gpu_worker.py:359] Available KV cache memory: {pool} GiB\n".format(**values)
    if given.get("fails"):
        return text + _TOO_SMALL.format(**values)
    tokens = int(
        float(str(values["pool"])) / float(str(values["need"])) * int(str(values["length"]))
    )
    text += f"INFO [kv_cache_utils.py:1286] GPU KV cache size: {tokens:,} tokens\n"
    return text + _SUMMARY.format(**values)


def sglang_log(share: float = 0.88, pool: float = 3.41, free: str = "23.20") -> str:
    """The log of one SGLang start; ``pool`` is the size of the keys, and of the values."""
    tokens = int(2 * pool * 8192)
    return (
        f"[2026-01-01 10:00:00] server_args=ServerArgs(model_path='org/m', dtype='auto', mem_fraction_static={share}, tp_size=1)\n"
        f"[2026-01-01 10:00:10 TP0] Load weight begin. avail mem={free} GB\n"
        "[2026-01-01 10:00:20 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.float16, avail mem=9.60 GB, mem usage=13.60 GB.\n"
        f"[2026-01-01 10:00:20 TP0] KV Cache is allocated. #tokens: {tokens}, K size: {pool} GB, V size: {pool} GB\n"
        "[2026-01-01 10:00:30 TP0] Capture cuda graph end. Time elapsed: 5.12 s. mem usage=0.90 GB. avail mem=1.88 GB.\n"
        f"[2026-01-01 10:00:30 TP0] max_total_num_tokens={tokens}, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=2048, context_len=8192, available_gpu_mem=1.88 GB\n"
    )


@pytest.fixture
def side() -> Callable[..., ComparedStart]:
    """One side of a comparison, from the text of a log."""
    return lambda text, number=None: compared_start(diagnose(text), number)


@pytest.fixture
def compared() -> Callable[[str, str], Comparison]:
    """The comparison of two logs' texts."""
    return lambda old, new: compare(compared_start(diagnose(old)), compared_start(diagnose(new)))


@pytest.fixture
def vllm() -> Callable[..., str]:
    """The log of one vLLM start, see ``vllm_log``."""
    return vllm_log


@pytest.fixture
def sglang() -> Callable[..., str]:
    """The log of one SGLang start, see ``sglang_log``."""
    return sglang_log
