"""Compute a perplexity over sliding windows from prompt log-probabilities, as a user's job does."""

import argparse
import json
import math
import random
from pathlib import Path

import psutil
from vllm import LLM, SamplingParams

WINDOWS = 6
CONTEXT = 2048
STRIDE = 512
VOCABULARY = 128256


def worker_bytes(field: str) -> int:
    """Return the largest value of a field of /proc/PID/status over the engine's processes."""
    sizes = []
    for child in psutil.Process().children(recursive=True):
        lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        sizes += [int(line.split()[1]) * 1024 for line in lines if line.startswith(field)]
    return max(sizes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--no-prefix-caching", action="store_true")
    asked = parser.parse_args()
    llm = LLM(
        asked.model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=CONTEXT + 1,
        max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=not asked.no_prefix_caching,
        disable_log_stats=False,
    )
    text = random.Random(0).choices(range(VOCABULARY), k=CONTEXT + (WINDOWS - 1) * STRIDE)
    windows = [text[start : start + CONTEXT] for start in range(0, WINDOWS * STRIDE, STRIDE)]
    standing = worker_bytes("VmRSS")
    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    scored = llm.generate(
        [{"prompt_token_ids": window} for window in windows], parameters, use_tqdm=False
    )
    total = 0.0
    count = 0
    for number, (window, output) in enumerate(zip(windows, scored, strict=True)):
        new = range(1 if number == 0 else CONTEXT - STRIDE, CONTEXT)
        total -= sum(output.prompt_logprobs[place][window[place]].logprob for place in new)
        count += len(new)
    hits = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits"]
    result = {
        "perplexity": math.exp(total / count),
        "tokens": count,
        "scoring_bytes": worker_bytes("VmHWM") - standing,
        "address_space_bytes": worker_bytes("VmPeak"),
        "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "step_tokens": llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens,
        "prefix_hits": sum(hits),
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
