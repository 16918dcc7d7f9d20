import dataclasses
import functools
import sys
from types import MappingProxyType

from vllm import LLM, SamplingParams

import oomguard


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    model: str
    max_model_len: int = 8192
    max_num_seqs: int = 16
    kv_cache_memory_bytes: int = 200_000_000
    num_gpu_blocks_override: int = 30  # from the days of 2k contexts
    dtype: str = "float16"
    load_format: str = "dummy"
    enforce_eager: bool = True


REGISTRY = MappingProxyType({"chat": functools.partial(LLM, **dataclasses.asdict(Profile("./chat")))})


@oomguard.guard
def make(name):
    return REGISTRY[name]()


def main():
    llm = make("chat")
    outputs = llm.generate(["hello there", "what now"], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    print("tokens", sum(len(o.outputs[0].token_ids) for o in outputs))
    config = llm.llm_engine.vllm_config
    print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("INPROC-DONE")
    return 0


if __name__ == "__main__":
    sys.exit(main())
