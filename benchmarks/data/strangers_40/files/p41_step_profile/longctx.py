from vllm import LLM, SamplingParams

MAX_LEN = 65536
SEQS = 16

if __name__ == "__main__":
    llm = LLM(
        model="./model",
        dtype="float16",
        load_format="dummy",
        max_model_len=MAX_LEN,
        max_num_seqs=SEQS,
        max_num_batched_tokens=MAX_LEN * SEQS,  # everything in one step
        kv_cache_memory_bytes=64 << 20,
        compilation_config={"mode": 2, "backend": "eager"},
    )
    out = llm.generate(["abc"] * 2, SamplingParams(max_tokens=3, ignore_eos=True))
    print("BLIND40-DONE", [len(o.outputs[0].token_ids) for o in out], flush=True)
