from vllm import LLM, EngineArgs, SamplingParams

import oomguard

ARGS = EngineArgs(
    model="./pythia",
    dtype="float16",
    load_format="dummy",
    enforce_eager=True,
    max_model_len=16384,
    max_num_seqs=4,
    kv_cache_memory_bytes=256 * 1024 * 1024,
    num_gpu_blocks_override=64,  # left over from a preemption test
)


def main():
    with oomguard.guard(allow="reduces-capacity"):
        llm = LLM.from_engine_args(ARGS)
    outputs = llm.generate(["Once upon a time", "In the beginning"], SamplingParams(max_tokens=12, ignore_eos=True))
    print([len(o.outputs[0].token_ids) for o in outputs])
    print("own args untouched:", ARGS.max_model_len == 16384 and ARGS.num_gpu_blocks_override == 64)
    print("VALUE max_model_len", llm.llm_engine.vllm_config.model_config.max_model_len)
    print("VALUE num_gpu_blocks_override", llm.llm_engine.vllm_config.cache_config.num_gpu_blocks_override)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
