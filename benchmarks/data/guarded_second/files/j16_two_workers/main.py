import os

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm import LLM, SamplingParams  # noqa: E402

import oomguard  # noqa: E402


def serve(config):
    with oomguard.guard(allow="reduces-capacity"):
        return LLM(**config)


def main():
    config = {
        "model": "./twin",
        "tensor_parallel_size": 2,
        "max_model_len": 30_000,
        "kv_cache_memory_bytes": 12_000_000,
        "max_num_seqs": 8,
        "dtype": "float16",
        "load_format": "dummy",
        "enforce_eager": True,
    }
    llm = serve(config)
    outputs = llm.generate(["left", "right"], SamplingParams(max_tokens=5, ignore_eos=True))
    print("outputs", len(outputs))
    vllm_config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", vllm_config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", vllm_config.cache_config.kv_cache_memory_bytes)
    print("VALUE tensor_parallel_size", vllm_config.parallel_config.tensor_parallel_size)
    print("VALUE max_num_seqs", vllm_config.scheduler_config.max_num_seqs)
    assert config["max_model_len"] == 30_000, "the caller's own dict was changed"
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
