import resource
from contextlib import contextmanager

from vllm import LLM, SamplingParams

import oomguard


class Workspace:
    """Engines that live as long as a with block."""

    def __init__(self, limit_gib):
        self.limit = int(limit_gib * 2**30)

    @contextmanager
    def engine(self, **changes):
        resource.setrlimit(resource.RLIMIT_DATA, (self.limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        settings = {
            "model": "./millions",
            "max_num_seqs": 4,
            "max_num_batched_tokens": 2048,
            "kv_cache_memory_bytes": 540_000_000,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        }
        with oomguard.guard(allow="reduces-capacity"):
            llm = LLM(dtype="float16", load_format="dummy", enforce_eager=True, **settings, **changes)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def main():
    with Workspace(limit_gib=4).engine(max_model_len=1_000_000) as llm:
        sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        outputs = llm.generate(["one two three one two three one two", "a b a b a"], sampling, use_tqdm=False)
        print("tokens", [len(output.outputs[0].token_ids) for output in outputs])
        config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE num_speculative_tokens", config.speculative_config.num_speculative_tokens)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
