from vllm import LLM, SamplingParams

import oomguard


class ContractError(Exception):
    pass


def build(required):
    with oomguard.guard() as g:
        llm = LLM("./strict", dtype="float16", load_format="dummy", enforce_eager=True, max_model_len=required, kv_cache_memory_bytes=9_000_000, max_num_seqs=3)
    if llm.llm_engine.model_config.max_model_len != required:
        raise ContractError("the engine is shorter than the contract says")
    return llm


def main():
    llm = build(12_000)
    print("answers", len(llm.generate(["The contract"], SamplingParams(max_tokens=5, ignore_eos=True))))
    print("VALUE max_model_len", llm.llm_engine.vllm_config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_seqs", llm.llm_engine.vllm_config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
