"""python -m jobs.digest: a digest of each chunk."""
import argparse

from vllm import EngineArgs, LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunk", type=int, default=600)
    parser.add_argument("--chunks", type=int, default=4)
    args = parser.parse_args()
    engine_args = EngineArgs(
        model="./mistral",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=32768,
        max_num_batched_tokens=8192,
        max_num_seqs=8,
        kv_cache_memory_bytes=12 * 1024**2,
    )
    llm = LLM.from_engine_args(engine_args)
    prompts = [TokensPrompt(prompt_token_ids=[(13 * i + j) % 2000 + 5 for j in range(args.chunk)])
               for i in range(args.chunks)]
    outs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    total = sum(len(o.outputs[0].token_ids) for o in outs)
    print("DIGEST", len(outs), "chunks", total, "tokens", flush=True)


if __name__ == "__main__":
    main()
