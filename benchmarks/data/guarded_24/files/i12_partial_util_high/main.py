from functools import partial

from vllm import LLM, SamplingParams

import oomguard

cpu_llm = partial(LLM, dtype="float16", load_format="dummy", enforce_eager=True, gpu_memory_utilization=0.98, num_gpu_blocks_override=256)


def main():
    with oomguard.guard(on_patch=lambda patch: print("changed:", patch.setting)):
        llm = cpu_llm("./base", max_model_len=8192, max_num_seqs=8)
    outputs = llm.generate("The answer is", SamplingParams(n=2, max_tokens=6, temperature=0.9, ignore_eos=True))
    print(len(outputs[0].outputs), "samples")
    print("VALUE gpu_memory_utilization", llm.llm_engine.vllm_config.cache_config.gpu_memory_utilization)
    print("VALUE max_model_len", llm.llm_engine.vllm_config.model_config.max_model_len)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
