"""Summarise a long protocol."""
from vllm import LLM, SamplingParams

import oomguard


def main():
    with oomguard.guard(allow="reduces-capacity", pin=["kv_cache_memory_bytes"]) as g:
        llm = LLM("./minutes-7b", max_model_len=65536, kv_cache_memory_bytes=48_000_000, dtype="float16", load_format="dummy", enforce_eager=True, max_num_seqs=8)
    for attempt in g.attempts:
        print("attempt", attempt.number, [(p.setting, p.old, p.new) for p in attempt.patches], attempt.error)
    protocol = "The committee met and agreed on the budget. " * 60
    outputs = llm.generate([f"Summarise: {protocol}"], SamplingParams(max_tokens=16, ignore_eos=True))
    print("tokens:", len(outputs[0].outputs[0].token_ids))
    print("VALUE max_model_len", llm.llm_engine.vllm_config.model_config.max_model_len)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
