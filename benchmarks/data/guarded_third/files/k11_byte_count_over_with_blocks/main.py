import collections
import os
import types

from vllm import LLM, SamplingParams

import oomguard

# Copied from the big machine.
DEFAULTS = {"kv_cache_memory_bytes": 60_000_000_000, "max_model_len": 32768, "max_num_seqs": 12}
HERE = {"num_gpu_blocks_override": 300, "model": os.path.join(".", "ledger")}
ALWAYS = {"dtype": "float16", "load_format": "dummy", "enforce_eager": True}


class Lazy(types.ModuleType):
    """A module whose attribute `llm` makes the engine when it is first asked for."""

    def __getattr__(self, name):
        if name != "llm":
            raise AttributeError(name)
        with oomguard.guard(allow="reduces-capacity"):
            self.llm = LLM(**collections.ChainMap(HERE, DEFAULTS, ALWAYS))
        return self.llm


models = Lazy("models")

if __name__ == "__main__":
    outputs = models.llm.generate(["debit", "credit"], SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
    print("tokens", [len(o.outputs[0].token_ids) for o in outputs])
    config = models.llm.llm_engine.vllm_config
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")
