from vllm import LLM, SamplingParams

RATES = {"us": 1.0, "uk": 1.3}

if __name__ == "__main__":
    llm = LLM("./model", max_model_len=512, kv_cache_memory_bytes=16 << 20, dtype="float16", load_format="dummy", enforce_eager=True)
    out = llm.generate(["invoice"], SamplingParams(max_tokens=3, ignore_eos=True))
    print("HEALTHY50-DONE", len(out), flush=True)
    print("total", RATES["kv_cache"])
