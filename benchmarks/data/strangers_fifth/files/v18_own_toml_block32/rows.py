"""Rows of a job that a TOML file describes."""
import argparse
import tomllib

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    args = parser.parse_args()
    with open(args.job, "rb") as f:
        conf = tomllib.load(f)
    job = conf["job"]
    llm = LLM(**conf["engine"])
    prompts = [TokensPrompt(prompt_token_ids=[(11 + i + j) % 2000 + 5 for j in range(job["prompt_tokens"])])
               for i in range(job["rows"])]
    outs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True))
    lengths = {len(o.outputs[0].token_ids) for o in outs}
    assert len(lengths) == 1, lengths
    print("ROWS", len(outs), "x", lengths.pop(), flush=True)


if __name__ == "__main__":
    main()
