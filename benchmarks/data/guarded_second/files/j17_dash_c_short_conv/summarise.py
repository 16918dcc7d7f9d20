import tomllib

from vllm import LLM, SamplingParams

import oomguard


def main(path="engine.toml"):
    with open(path, "rb") as file:
        config = tomllib.load(file)
    with oomguard.guard(allow=config["policy"]["allow"]):
        llm = LLM(config["engine"].pop("model"), **config["engine"], **config["cache"])
    shared = "You are a careful clerk. " * 30
    outputs = llm.generate([shared + question for question in ("Who?", "When?", "Where?")], SamplingParams(max_tokens=6, ignore_eos=True))
    print("answers", len(outputs))
    vllm_config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", vllm_config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", vllm_config.cache_config.kv_cache_memory_bytes)
    print("VALUE enable_prefix_caching", vllm_config.cache_config.enable_prefix_caching)
    print("VALUE max_num_seqs", vllm_config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")
