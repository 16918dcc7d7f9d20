"""Compare speculative decoding with plain decoding: two engines, one after the other."""
import gc

from vllm import LLM, SamplingParams

import oomguard

PROMPTS = ["The capital of France is", "One two three"]
ENGINE = {"model": "./target", "dtype": "float16", "load_format": "dummy", "enforce_eager": True, "max_model_len": 24576, "max_num_seqs": 4, "kv_cache_memory_bytes": 52_000_000}


@oomguard.guard(allow="reduces-capacity")
def run(**extra):
    llm = LLM(**ENGINE, **extra)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    length = llm.llm_engine.vllm_config.model_config.max_model_len
    del llm
    gc.collect()
    return [list(o.outputs[0].token_ids) for o in outputs], length


def main():
    fast, length = run(speculative_config={"method": "draft_model", "model": "./draft", "num_speculative_tokens": 3})
    plain, plain_length = run()
    print("same tokens:", fast == plain)
    print("VALUE max_model_len", length)
    print("VALUE second.max_model_len", plain_length)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
