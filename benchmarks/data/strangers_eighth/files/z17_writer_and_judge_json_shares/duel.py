"""One model writes, another one judges."""
import json
import sys

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main(path):
    with open(path) as f:
        setup = json.load(f)
    judge, writer = (LLM(**setup[name], **setup["common"]) for name in ("judge", "writer"))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    texts = writer.generate([TokensPrompt(prompt_token_ids=[30 + i] * 50) for i in range(2)], params, use_tqdm=False)
    marks = judge.generate([TokensPrompt(prompt_token_ids=list(t.outputs[0].token_ids)) for t in texts], params, use_tqdm=False)
    print("DUEL", len(texts), len(marks), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
