"""One engine a rank; rank 0 reports."""
import os
import sys

import yaml
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main(path):
    with open(path) as f:
        job = yaml.safe_load(f)
    llm = LLM(**job["engine"])
    work = job["work"]
    prompts = [TokensPrompt(prompt_token_ids=[(17 * i + j) % 1900 + 20 for j in range(work["prompt_tokens"])])
               for i in range(work["prompts"])]
    outs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=work["new_tokens"], ignore_eos=True))
    if os.environ.get("RANK", "0") == "0":
        print("NIGHTLY", job["name"], sum(len(o.outputs[0].token_ids) for o in outs), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
