"""Vectors of our documents."""
import argparse

from vllm import LLM
from vllm.inputs import TokensPrompt


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--step", type=int, default=8192)
    args = parser.parse_args()
    llm = LLM("./bert", runner="pooling", max_num_batched_tokens=args.step, max_num_seqs=64, gpu_memory_utilization=0.3,
              dtype="float32", load_format="dummy", enforce_eager=True)
    docs = [TokensPrompt(prompt_token_ids=[(11 * i + 3 * j) % 1900 + 20 for j in range(500)]) for i in range(12)]
    vectors = [o.outputs.embedding for o in llm.embed(docs, use_tqdm=False)]
    print("EMBEDDED", len(vectors), len(vectors[0]), flush=True)


if __name__ == "__main__":
    main()
