import argparse
import os

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ctx", type=int, default=131072)
    args = parser.parse_args()
    llm = LLM(model="./model", max_model_len=args.ctx, kv_cache_memory_bytes=32 * 2**20, dtype="float16", load_format="dummy", enforce_eager=True, seed=3)
    outs = llm.generate(["the sky is"] * 3, SamplingParams(max_tokens=4, ignore_eos=True, n=2))
    print("HEALTHY50-DONE", os.environ["RANK"], sum(len(c.token_ids) for o in outs for c in o.outputs), flush=True)
