"""Run in the vLLM environment by guarded_speed.py: one guarded engine, asked through the guard's client and without it in turn."""

import json
import sys
import time

from vllm import LLM, SamplingParams

import oomguard

PROMPTS, TOKENS, WARM_UP = 16, 32, 8


def tokens_per_s(llm: LLM) -> float:
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate([f"question {number}" for number in range(PROMPTS)], params, use_tqdm=False)
    took = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / took


def main(model: str, pairs: int, control: str) -> None:
    with oomguard.guard(restart=True):
        llm = LLM(
            model,
            dtype="float16",
            enforce_eager=True,
            kv_cache_memory_bytes=16_000_000,
            max_model_len=512,
            max_num_seqs=16,
            enable_prefix_caching=False,
        )
    engine = llm.llm_engine
    attending = engine.engine_core
    clients = {"guarded": attending, "bare": attending.inner}
    if control == "1":
        clients["guarded"] = clients["bare"]
    for number in range(WARM_UP + pairs):
        found = {}
        for name in ("bare", "guarded") if number % 2 else ("guarded", "bare"):
            engine.engine_core = clients[name]
            found[name] = tokens_per_s(llm)
        if number >= WARM_UP:
            print("PAIR", json.dumps(found), flush=True)
    engine.engine_core = attending


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
