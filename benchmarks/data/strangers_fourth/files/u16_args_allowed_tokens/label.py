"""Labels lines with one of a few tokens. Takes every engine argument of vLLM."""
import dataclasses

from vllm import LLM, EngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main():
    parser = FlexibleArgumentParser(description=__doc__)
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--labels", default="11,12,13,14")
    parser.add_argument("--lines", type=int, default=24)
    args = parser.parse_args()
    labels = [int(x) for x in args.labels.split(",")]
    engine_args = EngineArgs.from_cli_args(args)
    fields = {
        f.name: getattr(engine_args, f.name) for f in dataclasses.fields(engine_args)
    }
    llm = LLM(**fields)
    outs = llm.generate(
        [TokensPrompt(prompt_token_ids=[20 + i] * 30) for i in range(args.lines)],
        SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=labels),
    )
    got = [o.outputs[0].token_ids[0] for o in outs]
    assert all(g in labels for g in got), got
    print("LABELLED", len(got))


if __name__ == "__main__":
    main()
