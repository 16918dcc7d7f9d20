import json
import os
import resource

from vllm import LLM, SamplingParams

import oomguard


def load_settings():
    """Settings of this job; JOB_SETTINGS may hold others."""
    default = {
        "memory_gib": 2,
        "stories": 300,
        "engine": {
            "model": "./stories",
            "dtype": "float16",
            "load_format": "dummy",
            "enforce_eager": True,
            "max_model_len": 1024,
            "kv_cache_memory_bytes": 120_000_000,
        },
        "sampling": {"temperature": 0.9, "top_p": 0.95, "max_tokens": 12, "ignore_eos": True},
    }
    return default | json.loads(os.environ.get("JOB_SETTINGS", "{}"))


@oomguard.guard()
def run(settings):
    llm = LLM(**settings["engine"])
    warm = llm.generate(["a test"], SamplingParams(**settings["sampling"]), use_tqdm=False)
    print("test", len(warm[0].outputs[0].token_ids))
    prompts = [f"Story {number}: " for number in range(settings["stories"])]
    outputs = llm.generate(prompts, SamplingParams(**settings["sampling"]), use_tqdm=False)
    return llm.llm_engine.vllm_config, [len(output.outputs[0].token_ids) for output in outputs]


def main():
    settings = load_settings()
    limit = settings["memory_gib"] << 30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    config, lengths = run(settings)
    print("stories", len(lengths), set(lengths))
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
