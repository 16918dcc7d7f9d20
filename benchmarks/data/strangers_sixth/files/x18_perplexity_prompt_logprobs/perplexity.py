"""Perplexity of a long document under a model: the flags are vLLM's own."""
import math

from vllm import LLM, EngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--tokens", type=int, default=28000)
    args = vars(parser.parse_args())
    tokens = args.pop("tokens")
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(type("A", (), args)))
    document = [(31 * j + 7) % 1900 + 10 for j in range(tokens)]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    out = llm.generate([TokensPrompt(prompt_token_ids=document)], params)[0]
    values = [lp[t].logprob for t, lp in zip(document[1:], out.prompt_logprobs[1:])]
    print("PERPLEXITY tokens", len(values), "value", round(math.exp(-sum(values) / len(values)), 1), flush=True)


if __name__ == "__main__":
    main()
