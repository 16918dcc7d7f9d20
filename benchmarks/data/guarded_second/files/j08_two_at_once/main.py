from vllm import LLM, SamplingParams

import oomguard

COMMON = dict(dtype="float16", load_format="dummy", enforce_eager=True)


def main():
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)

    def pair():
        writer = LLM("./writer", max_model_len=8192, kv_cache_memory_bytes=5 * 2**30, **COMMON)
        critic = LLM("./critic", max_model_len=8192, gpu_memory_utilization=0.8, num_gpu_blocks_override=300, max_num_seqs=32, **COMMON)
        return writer, critic

    with oomguard.guard():
        writer, critic = pair()
    drafts = writer.generate(["A poem about tea", "A poem about salt"], sampling)
    verdicts = critic.generate([{"prompt_token_ids": [7, 8, 9] + list(draft.outputs[0].token_ids)} for draft in drafts], sampling)
    print("verdicts", len(verdicts))
    config = critic.llm_engine.vllm_config
    print("VALUE gpu_memory_utilization", config.cache_config.gpu_memory_utilization)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    assert writer.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes == 5 * 2**30
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
