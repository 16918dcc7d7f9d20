import contextlib
import sys

from vllm import LLM, SamplingParams

import oomguard


def main(argv):
    llm = LLM(
        "./scout",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=65_536,
        max_num_batched_tokens=32_768,
        kv_cache_memory_bytes=48_000_000,
        max_num_seqs=10,
    )
    prompts = [{"prompt_token_ids": [30 + (n * k) % 1900 for n in range(300 * k)]} for k in (1, 2, 5)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    print("outputs", [len(output.outputs[0].token_ids) for output in outputs])
    config = llm.llm_engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")
    return 0


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        stack.enter_context(oomguard.guard())
        status = main(sys.argv[1:])
    sys.exit(status)
