from vllm import LLM, SamplingParams

import oomguard

COMMON = dict(dtype="float16", load_format="dummy", enforce_eager=True)
ENGINES = {
    "drafts": dict(model="./drafts", max_model_len=4096, max_num_seqs=8, kv_cache_memory_bytes=8_000_000_000),
    # its cache is fixed, the share was copied from the one-engine setup
    "review": dict(
        model="./review", max_model_len=6144, max_num_seqs=8, num_gpu_blocks_override=64, gpu_memory_utilization=0.75
    ),
}


class Registry(dict):
    """Engines by name, each started when it is first asked for, and kept."""

    def __missing__(self, name):
        with oomguard.guard():
            self[name] = LLM(**COMMON, **ENGINES[name])
        return self[name]


def lengths(llm, prompts):
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    return [len(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False)]


if __name__ == "__main__":
    engines = Registry()
    print("drafts", lengths(engines["drafts"], ["write a poem", "write a letter"]))
    print("review", lengths(engines["review"], ["is this poem good?"]))
    print("drafts again", lengths(engines["drafts"], ["write a better poem"]))  # still there
    first = engines["drafts"].llm_engine.vllm_config
    assert first.cache_config.kv_cache_memory_bytes == 8_000_000_000
    assert first.model_config.max_model_len == 4096
    config = engines["review"].llm_engine.vllm_config
    print("VALUE gpu_memory_utilization", config.cache_config.gpu_memory_utilization)
    print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")
