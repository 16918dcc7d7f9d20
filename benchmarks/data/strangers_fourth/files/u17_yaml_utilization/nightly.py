"""Reads job.yaml, makes a few summaries."""
import sys

import yaml

from vllm import LLM, SamplingParams


def main(path):
    job = yaml.safe_load(open(path))
    e = job["engine"]
    llm = LLM(
        model=e["model"],
        dtype=e["dtype"],
        load_format=e["load_format"],
        enforce_eager=e["enforce_eager"],
        max_model_len=e["context"],
        gpu_memory_utilization=e["memory_share"],
        max_num_seqs=e["max_num_seqs"],
    )
    outs = llm.generate(
        [{"prompt_token_ids": [9 + i] * 200} for i in range(job["prompts"])],
        SamplingParams(max_tokens=6, ignore_eos=True),
    )
    print("SUMMARIES", sum(len(o.outputs[0].token_ids) for o in outs))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "job.yaml")
