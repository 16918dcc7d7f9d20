"""Sixteen rollouts of each prompt, for the next step of GRPO."""
import argparse

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seats", type=int, default=256)
    args = parser.parse_args()
    llm = LLM("./qwen", max_model_len=512, max_num_seqs=args.seats, max_num_batched_tokens=4096, seed=7,
              kv_cache_memory_bytes=192 * 2**20, dtype="float16", load_format="dummy", enforce_eager=True,
              skip_tokenizer_init=True)
    params = SamplingParams(n=args.samples, temperature=1.0, top_p=0.95, max_tokens=3, detokenize=False, ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=[1000 + 17 * i, 5, 8, 13]) for i in range(64)]
    outs = llm.generate(prompts, params, use_tqdm=False)
    rollouts = [c for o in outs for c in o.outputs]
    print("ROLLOUTS", len(outs), len(rollouts), sum(len(c.token_ids) for c in rollouts), flush=True)


if __name__ == "__main__":
    main()
