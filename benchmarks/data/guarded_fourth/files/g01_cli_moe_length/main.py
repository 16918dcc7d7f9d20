"""Offline batch inference with vLLM's own flags, after examples/offline_inference/basic/generate.py."""

import sys

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

import oomguard

FLAGS = """
--model ./experts --dtype float16 --load-format dummy --enforce-eager
--max-model-len 60000 --block-size 64 --max-num-seqs 24 --kv-cache-memory-bytes 10000000
--max-tokens 6 --temperature 0
""".split()


def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="meta-llama/Llama-3.2-1B-Instruct")
    sampling_group = parser.add_argument_group("Sampling parameters")
    sampling_group.add_argument("--max-tokens", type=int)
    sampling_group.add_argument("--temperature", type=float)
    sampling_group.add_argument("--top-p", type=float)
    return parser


def main(args: dict):
    max_tokens = args.pop("max_tokens")
    temperature = args.pop("temperature")
    top_p = args.pop("top_p")

    with oomguard.guard(allow="reduces-capacity"):
        llm = LLM(**args)

    sampling_params = llm.get_default_sampling_params()
    if max_tokens is not None:
        sampling_params.max_tokens = max_tokens
    if temperature is not None:
        sampling_params.temperature = temperature
    if top_p is not None:
        sampling_params.top_p = top_p
    sampling_params.ignore_eos = True

    prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
    for output in llm.generate(prompts, sampling_params):
        print(f"Prompt: {output.prompt!r}, tokens: {len(output.outputs[0].token_ids)}")

    config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE block_size", config.cache_config.block_size)


if __name__ == "__main__":
    main(vars(create_parser().parse_args(sys.argv[1:] or FLAGS)))
    print("INPROC-DONE")
