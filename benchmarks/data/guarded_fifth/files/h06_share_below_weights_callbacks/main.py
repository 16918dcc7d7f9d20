import argparse
import logging
import sys

from vllm import EngineArgs, LLMEngine, SamplingParams

import oomguard

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
log = logging.getLogger("complete")


def parse():
    parser = argparse.ArgumentParser(description="Completes code on the build machine, with as little memory as possible")
    parser = EngineArgs.add_cli_args(parser)
    return EngineArgs.from_cli_args(
        parser.parse_args(
            sys.argv[1:]
            or "--model ./coder --dtype float16 --load-format dummy --enforce-eager --max-model-len 4096 "
            "--max-num-seqs 2 --gpu-memory-utilization 0.02".split()
        )
    )


@oomguard.guard(
    on_incident=lambda incident: log.warning("the engine failed: %s", type(incident).__name__),
    on_patch=lambda patch: log.warning("changed: %s %s -> %s", patch.setting, patch.old, patch.new),
)
def start(args):
    return LLMEngine.from_engine_args(args)


def complete(engine, snippets):
    for number, snippet in enumerate(snippets):
        engine.add_request(f"snippet-{number}", snippet, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                yield output.request_id, len(output.outputs[0].token_ids)


def main():
    engine = start(parse())
    print(dict(complete(engine, ["def add(a, b):", "for i in range(", "import ", "class Foo("])))
    config = engine.vllm_config
    print("VALUE gpu_memory_utilization", config.cache_config.gpu_memory_utilization)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
