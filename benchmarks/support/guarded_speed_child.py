"""Run in the vLLM environment by guarded_speed.py: a bare engine and a guarded one in one process, asked in turn."""

import json
import signal
import sys
import time

import psutil
from vllm import LLM, SamplingParams

import oomguard

PROMPTS, TOKENS, WARM_UP = 16, 32, 4


def made(model: str) -> LLM:
    return LLM(
        model, dtype="float16", enforce_eager=True, kv_cache_memory_bytes=16_000_000, max_model_len=512,
        max_num_seqs=16, enable_prefix_caching=False,
    )  # fmt: skip


def tokens_per_s(llm: LLM) -> float:
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate([f"question {number}" for number in range(PROMPTS)], params, use_tqdm=False)
    took = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / took


def tree() -> set[psutil.Process]:
    """Return the engines' processes, without what Python keeps for shared memory."""
    return {p for p in psutil.Process().children(recursive=True) if "tracker" not in " ".join(p.cmdline())}


def main(model: str, pairs: int, guarded_first: str, both_bare: str) -> None:
    engines, trees, known = {}, {}, set()
    for name in ("guarded", "bare") if guarded_first == "1" else ("bare", "guarded"):
        if name == "bare" or both_bare == "1":
            engines[name] = made(model)
        else:
            with oomguard.guard(restart=True):
                engines[name] = made(model)
        trees[name], known = tree() - known, tree()
    for number in range(WARM_UP + pairs):
        found = {}
        for name in ("bare", "guarded") if number % 2 else ("guarded", "bare"):
            others = trees["guarded" if name == "bare" else "bare"]
            for process in others:  # an idle engine looks for work, and takes time too
                process.send_signal(signal.SIGSTOP)
            found[name] = tokens_per_s(engines[name])
            for process in others:
                process.send_signal(signal.SIGCONT)
        if number >= WARM_UP:
            print("PAIR", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:5])
