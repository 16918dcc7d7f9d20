import os

from vllm import LLM, SamplingParams

N = int(os.getenv("FANOUT", "32768"))

if __name__ == "__main__":
    llm = LLM("./model", dtype="float32", load_format="dummy", max_model_len=2048, max_num_seqs=N, max_num_batched_tokens=max(N, 2048),
              kv_cache_memory_bytes=64 << 20, compilation_config={"mode": 2, "backend": "eager"})
    out = llm.generate(["abc"] * 4, SamplingParams(max_tokens=3, ignore_eos=True))
    print("BLIND40-DONE", len(out), flush=True)
