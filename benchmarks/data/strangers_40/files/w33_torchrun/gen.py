import argparse

from vllm import LLM, SamplingParams


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ctx", type=int, default=4096)
    args = parser.parse_args()
    llm = LLM("./model", max_model_len=args.ctx, kv_cache_memory_bytes=33 * 2**20, dtype="float16", load_format="dummy", enforce_eager=True, seed=1)
    out = llm.generate(["hello there"], SamplingParams(max_tokens=4, ignore_eos=True))
    print("BLIND40-DONE", len(out[0].outputs[0].token_ids), flush=True)


if __name__ == "__main__":
    main()
