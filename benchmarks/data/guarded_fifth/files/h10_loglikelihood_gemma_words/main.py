"""Log-likelihood of continuations, as an evaluation harness asks for it."""

import resource

from vllm import LLM, SamplingParams, TokensPrompt

import oomguard


class Scorer:
    def __init__(self, model, **kwargs):
        self.llm = LLM(model, **kwargs)
        self.sampling = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1, detokenize=False)

    def loglikelihood(self, requests):
        prompts = [TokensPrompt(prompt_token_ids=context + continuation) for context, continuation in requests]
        outputs = self.llm.generate(prompts, self.sampling, use_tqdm=False)
        for (context, continuation), output in zip(requests, outputs, strict=True):
            logprobs = output.prompt_logprobs[len(context) :]
            yield sum(entry[token].logprob for token, entry in zip(continuation, logprobs, strict=True))


def request(seed, context, continuation):
    tokens = [5 + (seed * 7919 + n * 104729) % 250_000 for n in range(context + continuation)]
    return tokens[:context], tokens[context:]


@oomguard.guard
def main():
    scorer = Scorer(
        "./gemma",
        max_model_len=4096,
        max_num_seqs=4,
        kv_cache_memory_bytes=40_000_000,
        enable_prefix_caching=False,
        dtype="float32",
        load_format="dummy",
        enforce_eager=True,
    )
    for shots, length in enumerate((60, 400, 3500)):
        scores = list(scorer.loglikelihood([request(shots, length, 20)]))
        assert len(scores) == 1 and scores[0] < 0
        print(f"{shots} shots: {scores[0]:.3f}")
    config = scorer.llm.llm_engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (5 << 30, resource.RLIM_INFINITY))
    main()
    print("INPROC-DONE")
