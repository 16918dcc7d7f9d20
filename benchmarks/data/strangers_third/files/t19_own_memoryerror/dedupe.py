"""Generate, then compare everything with everything."""
import numpy as np


def main():
    from vllm import LLM, SamplingParams
    llm = LLM(model="./lm", dtype="float16", load_format="dummy", enforce_eager=True, max_model_len=2048,
              max_num_seqs=8, max_num_batched_tokens=2048, kv_cache_memory_bytes=64 << 20)
    out = llm.generate([{"prompt_token_ids": [1] + [5 + i] * 20} for i in range(4)], SamplingParams(max_tokens=4), use_tqdm=False)
    print("generated", len(out))
    sim = np.ones((75000, 75000))
    print("pairs", int(sim.sum()))
    print("BLIND3-DONE")


if __name__ == "__main__":
    main()
