"""A drafter and a reviewer live side by side; only the reviewer asks for too much."""
from vllm import LLM, SamplingParams

import oomguard

COMMON = {"dtype": "float16", "load_format": "dummy", "enforce_eager": True, "max_num_seqs": 4}


def main():
    with oomguard.guard(allow="reduces-capacity") as g:
        drafter = LLM("./drafter", max_model_len=2048, kv_cache_memory_bytes=16 * 2**20, **COMMON)
        reviewer = LLM("./reviewer", max_model_len=16384, kv_cache_memory_bytes=10_000_000, **COMMON)
    print("attempts:", len(g.attempts))
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    draft = drafter.generate("Write a letter.", sampling)[0].outputs[0]
    review = reviewer.generate({"prompt_token_ids": [65, 66, 67, *list(draft.token_ids)]}, sampling)[0].outputs[0]
    print(len(draft.token_ids), len(review.token_ids))
    print("VALUE first.max_model_len", drafter.llm_engine.vllm_config.model_config.max_model_len)
    print("VALUE max_model_len", reviewer.llm_engine.vllm_config.model_config.max_model_len)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
