import functools
from types import SimpleNamespace

from vllm import LLM, SamplingParams

import oomguard

options = SimpleNamespace(
    model="./editor",
    max_model_len=32_000,
    max_num_seqs=8,
    kv_cache_memory_bytes=20_000_000,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    },
)


@functools.cache
@oomguard.guard(allow="reduces-capacity", floors={"max_model_len": 2048})
def get_engine():
    return LLM(dtype="float16", load_format="dummy", enforce_eager=True, **vars(options))


def rewrite(text, instruction):
    prompt = f"{instruction}\n{text}\n{text}\n"
    output = get_engine().generate(prompt, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True), use_tqdm=False)
    return len(output[0].outputs[0].token_ids)


if __name__ == "__main__":
    print("edits", rewrite("def f(a, b): return a + b", "add types"), rewrite("def g(): pass", "add a comment"))
    config = get_engine().llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE num_speculative_tokens", config.speculative_config.num_speculative_tokens)
    print("INPROC-DONE")
