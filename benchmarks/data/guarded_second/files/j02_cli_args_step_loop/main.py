import sys

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

import oomguard

DEFAULTS = "--model ./answers --dtype float16 --load-format dummy --enforce-eager --max-model-len 96k --block-size 32 --kv-cache-memory-bytes 25M --max-num-seqs 12"


def create(argv):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="answers from the shell"))
    args = parser.parse_args(argv or DEFAULTS.split())
    return LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))


def main():
    guard = oomguard.guard(allow="reduces-capacity")
    with guard:
        engine = create(sys.argv[1:])
    waiting = [(f"q{n}", f"What is {n} plus {n}?") for n in range(5)]
    finished = []
    while waiting or engine.has_unfinished_requests():
        if waiting:
            name, text = waiting.pop(0)
            engine.add_request(name, text, SamplingParams(max_tokens=6, ignore_eos=True))
        finished += [output.request_id for output in engine.step() if output.finished]
    print("finished", len(finished))
    print("VALUE max_model_len", engine.vllm_config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", engine.vllm_config.cache_config.kv_cache_memory_bytes)
    print("VALUE block_size", engine.vllm_config.cache_config.block_size)
    print("VALUE max_num_seqs", engine.vllm_config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
