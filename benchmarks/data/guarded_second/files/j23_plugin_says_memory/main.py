from vllm import LLM, SamplingParams

import oomguard


def main():
    with oomguard.guard(allow="reduces-capacity", max_attempts=4):
        llm = LLM(
            "./filtered",
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=4096,
            kv_cache_memory_bytes=60_000_000,
            max_num_seqs=9,
            logits_processors=["wordlist:BanWords"],
        )
    print("answers", len(llm.generate(["A clean text"], SamplingParams(max_tokens=5, ignore_eos=True))))
    print("VALUE max_model_len", llm.llm_engine.vllm_config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_seqs", llm.llm_engine.vllm_config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
