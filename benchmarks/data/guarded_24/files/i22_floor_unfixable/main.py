"""Contracts have up to 16,000 tokens: a shorter context is of no use, so say so and fall back."""
import sys

from vllm import LLM, SamplingParams

import oomguard


def main():
    try:
        with oomguard.guard(allow="reduces-capacity", floors={"max_model_len": 16384}, pin=["kv_cache_memory_bytes", "dtype"]):
            llm = LLM("./contracts", max_model_len=32768, kv_cache_memory_bytes=20_000_000, dtype="float16", load_format="dummy", enforce_eager=True, max_num_seqs=2)
    except RuntimeError as error:
        print("notes:", len(getattr(error, "__notes__", [])), file=sys.stderr)
        print("CAUGHT", type(error).__name__)
        return
    print(len(llm.generate("Clause 1", SamplingParams(max_tokens=4, ignore_eos=True))))
    print("VALUE max_model_len", llm.llm_engine.vllm_config.model_config.max_model_len)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
