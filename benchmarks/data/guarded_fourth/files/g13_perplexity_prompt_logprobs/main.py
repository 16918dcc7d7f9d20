"""Perplexity of documents, by the log-probabilities of their own tokens."""

import math
import random
import resource

from vllm import LLM, SamplingParams, TokensPrompt

import oomguard

SAMPLING = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, ignore_eos=True)


def perplexity(output):
    logprobs = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry]
    return math.exp(-sum(logprobs) / len(logprobs)), len(logprobs)


def documents():
    draw = random.Random(3)
    for length in (40, 200, 3000, 120):
        yield [draw.randrange(10, 200_000) for _ in range(length)]


def main():
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    with oomguard.guard():
        llm = LLM(
            "./scorer",
            max_model_len=4096,
            max_num_seqs=4,
            max_num_batched_tokens=4096,
            kv_cache_memory_bytes=32_000_000,
            enable_prefix_caching=False,
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
        )
    for tokens in documents():
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=tokens)], SAMPLING, use_tqdm=False)
        value, count = perplexity(output)
        assert count == len(tokens) - 1 and value > 0
        print("perplexity of", len(tokens), "tokens:", round(value))
    config = llm.llm_engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE enable_prefix_caching", config.cache_config.enable_prefix_caching)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
