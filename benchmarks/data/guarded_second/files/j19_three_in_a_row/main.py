import gc

from vllm import LLM, SamplingParams

import oomguard

ROUNDS = [
    {"model": "./small", "max_model_len": 2048, "kv_cache_memory_bytes": 16_000_000, "dtype": "float16"},
    {"model": "./middle", "max_model_len": 4096, "kv_cache_memory_bytes": 16_000_000, "dtype": "float16"},
    {"model": "./large", "max_model_len": 8192, "kv_cache_memory_bytes": 40_000_000, "dtype": "float32"},
]


def main():
    report = {}
    with oomguard.guard(allow="reduces-capacity"):
        for options in ROUNDS:
            llm = LLM(**options, load_format="dummy", enforce_eager=True, max_num_seqs=16)
            outputs = llm.generate(["The answer is", "The question was"], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
            config = llm.llm_engine.vllm_config
            report[options["model"]] = (len(outputs), config.model_config.max_model_len, config.cache_config.kv_cache_memory_bytes, config.scheduler_config.max_num_seqs)
            del llm
            gc.collect()
    print("report", report)
    assert report["./small"][1:3] == (2048, 16_000_000)
    assert report["./middle"][1:3] == (4096, 16_000_000)
    print("VALUE max_model_len", report["./large"][1])
    print("VALUE kv_cache_memory_bytes", report["./large"][2])
    print("VALUE max_num_seqs", report["./large"][3])
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
