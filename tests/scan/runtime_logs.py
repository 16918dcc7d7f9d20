"""Logs as a container runtime writes them: stamp, stream, a tag, and long lines in pieces."""

from collections.abc import Iterable

_ENGINE = "(EngineCore pid=7) ERROR 11-25 05:14:52 [core.py:1510]"
FAILURE = [
    "(APIServer pid=1) INFO 11-25 05:14:27 [api_utils.py:286] non-default args: {'model': 'org/M-8B', 'max_model_len': 32768}",
    (
        "(EngineCore pid=7) INFO 11-25 05:14:40 [core.py:109] Initializing a V1 LLM engine (v0.19.0) with config: model='org/M-8B',"
        " speculative_config=None, tokenizer='org/M-8B', dtype=torch.bfloat16, max_seq_len=32768, tensor_parallel_size=1"
    ),
    "(EngineCore pid=7) INFO 11-25 05:14:50 [gpu_worker.py:298] Available KV cache memory: 0.50 GiB",
    f"{_ENGINE} EngineCore failed to start.",
    f"{_ENGINE} Traceback (most recent call last):",
    (
        f"{_ENGINE} ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GiB KV cache is needed, which is"
        " larger than the available KV cache memory (0.50 GiB). Based on the available memory, the estimated maximum model length is 1792."
        " Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
    ),
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]
HEALTHY = [
    "GET /metrics 200",
    "Adding requests: 100%" + "|#####" * 40,
    "INFO: 10.0.0.7 - POST /v1/completions 200 OK",
]


def tagged(lines: Iterable[str], stream: str = "stderr") -> list[str]:
    """Return lines that were not cut."""
    return [f"{_stamp(n)} {stream} F {text}\n" for n, text in enumerate(lines)]


def pieces_of(lines: Iterable[str], size: int, stream: str = "stderr") -> list[str]:
    """Return lines cut into pieces of so many characters."""
    written = []
    for n, text in enumerate(lines):
        parts = [text[at : at + size] for at in range(0, max(1, len(text)), size)]
        written += [f"{_stamp(n)} {stream} P {part}\n" for part in parts[:-1]] + [
            f"{_stamp(n)} {stream} F {parts[-1]}\n"
        ]
    return written


def _stamp(n: int) -> str:
    return f"2026-11-25T05:{14 + n // 60 % 40}:{n % 60:02d}.123456789Z"
