import argparse

from vllm import LLM, SamplingParams

import oomguard


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="./minutes")
    parser.add_argument("--context", type=int, default=100_000)
    parser.add_argument("--share", type=float, default=0.06, help="share of the memory for the engine")
    parser.add_argument("--parallel", type=int, default=2)
    return parser.parse_args()


def make_engine(options):
    return LLM(
        options.model,
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=options.context,
        gpu_memory_utilization=options.share,
        max_num_seqs=options.parallel,
    )


def main():
    options = parse()
    with oomguard.guard():
        llm = make_engine(options)
    output = llm.generate([{"prompt_token_ids": [5] * 3000}], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    print("summary", len(output.outputs[0].token_ids))
    config = llm.llm_engine.vllm_config
    print("VALUE gpu_memory_utilization", config.cache_config.gpu_memory_utilization)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
