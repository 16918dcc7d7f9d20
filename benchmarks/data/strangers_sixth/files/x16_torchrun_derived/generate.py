"""torchrun --standalone --nproc-per-node=1 generate.py"""
import os

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def main():
    prompts = [TokensPrompt(prompt_token_ids=[(7 * i + j) % 2000 + 5 for j in range(300)]) for i in range(4)]
    mine = prompts[RANK::WORLD]
    llm = LLM(
        model="./olmoe",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_num_seqs=8,
        kv_cache_memory_bytes=40 << 20,
    )
    outs = llm.generate(mine, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    print("RANK", RANK, "wrote", len(outs), "x", len(outs[0].outputs[0].token_ids), flush=True)


if __name__ == "__main__":
    main()
