from vllm import LLM, SamplingParams

import oomguard


class Scorer:
    options = dict(dtype="float32", load_format="dummy", enforce_eager=True, max_model_len=32_768, max_num_batched_tokens=32_768, kv_cache_memory_bytes=48_000_000, max_num_seqs=2)

    def __init__(self, path, **options):
        self.path = path
        self.options = {**self.options, **options}

    @oomguard.guard(max_attempts=3)
    def load(self):
        self.llm = LLM(self.path, **self.options)

    def score(self, tokens):
        """(how many tokens, the sum of their log-probabilities)"""
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
        (output,) = self.llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        entries = [entry for entry in output.prompt_logprobs if entry is not None]
        return len(entries), sum(next(iter(entry.values())).logprob for entry in entries)

    def facts(self):
        config = self.llm.llm_engine.vllm_config
        return {
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_model_len": config.model_config.max_model_len,
            "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
        }
