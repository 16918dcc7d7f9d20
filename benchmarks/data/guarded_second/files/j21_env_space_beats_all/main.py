from vllm import LLM, SamplingParams

import oomguard


def main():
    with oomguard.guard(allow="reduces-capacity"):
        llm = LLM("./opt", dtype="float16", load_format="dummy", enforce_eager=True, max_model_len=1024, max_num_seqs=5, gpu_memory_utilization=0.3)
    print("answers", len(llm.generate(["Once"], SamplingParams(max_tokens=5, ignore_eos=True))))
    print("VALUE max_model_len", llm.llm_engine.vllm_config.model_config.max_model_len)
    print("VALUE gpu_memory_utilization", llm.llm_engine.vllm_config.cache_config.gpu_memory_utilization)
    print("VALUE max_num_seqs", llm.llm_engine.vllm_config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
