import numpy as np
from vllm import LLM, SamplingParams

import oomguard


def cross_table(rows):
    """All pairs at once if the host has room, else a row at a time."""
    try:
        return float(np.empty((rows, rows), dtype=np.float64).shape[0])
    except MemoryError as error:
        print("too large for one table:", type(error).__name__)
        return float(sum(1 for _ in range(rows // 100_000)))


def main():
    with oomguard.guard(allow="reduces-capacity") as g:
        llm = LLM("./plain", dtype="float16", load_format="dummy", enforce_eager=True, max_model_len=8192, kv_cache_memory_bytes=50_000_000, max_num_seqs=7)
        outputs = llm.generate(["row", "column"], SamplingParams(max_tokens=6, ignore_eos=True))
        print("table", cross_table(5_000_000))
        outputs += llm.generate(["sum"], SamplingParams(max_tokens=6, ignore_eos=True))
    print("outputs", len(outputs), "attempts", len(g.attempts))
    config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
