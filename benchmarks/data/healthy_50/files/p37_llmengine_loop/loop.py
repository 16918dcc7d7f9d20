import argparse
import sys

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="the loop of the docs"))
    args = parser.parse_args()
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    print("ERROR: metrics endpoint http://127.0.0.1:1 is unreachable, going on without it", file=sys.stderr)
    todo = [(str(i), "abc abc abc abc " * (i + 1), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)) for i in range(4)]
    done = {}
    while todo or engine.has_unfinished_requests():
        if todo:
            engine.add_request(*todo.pop(0))
        for out in engine.step():
            if out.finished:
                done[out.request_id] = len(out.outputs[0].token_ids)
    print("HEALTHY50-DONE", done, flush=True)


if __name__ == "__main__":
    main()
