from vllm import LLM, SamplingParams

import oomguard

PRESETS = {
    "quick": dict(max_num_seqs=64, max_num_batched_tokens=4096),
    "flood": dict(max_num_seqs=32_768, max_num_batched_tokens=32_768),
}


def engine_factory(preset):
    def build(**extra):
        return LLM("./polyglot", dtype="float32", load_format="dummy", max_model_len=1024, kv_cache_memory_bytes=100_000_000, **PRESETS[preset], **extra)

    return build


def main():
    build = engine_factory("flood")
    with oomguard.guard(allow="reduces-capacity"):
        llm = build(seed=3)
    outputs = llm.generate([f"Say {word} in French" for word in ("tea", "milk", "bread", "cheese")], SamplingParams(max_tokens=3, ignore_eos=True, temperature=0))
    print("translations", len(outputs))
    config = llm.llm_engine.vllm_config
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
