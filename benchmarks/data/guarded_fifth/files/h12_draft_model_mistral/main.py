"""Speculative decoding with a draft model, after vLLM's own example."""

from vllm import LLM, SamplingParams

import oomguard

SPECULATION = {"method": "draft_model", "model": "./draft", "num_speculative_tokens": 3}


def build(speculation=SPECULATION):
    return LLM(
        model="./target",
        speculative_config=speculation,
        max_model_len=32768,
        max_num_seqs=4,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=15_000_000,
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
    )


def main():
    guarded = oomguard.guard(allow="reduces-capacity")(build)
    llm = guarded()
    prompts = ["The future of AI is", "Once upon a time", "In a galaxy far away"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for output in outputs:
        print(f"prompt {output.prompt!r}: {len(output.outputs[0].token_ids)} tokens")
    config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE num_speculative_tokens", config.speculative_config.num_speculative_tokens)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
