import resource
from string import Template

import yaml
from vllm import LLM, SamplingParams

import oomguard

CONFIG = Template(
    """
model: ./hall
dtype: float16
load_format: dummy
enforce_eager: true
max_model_len: 131072
max_num_seqs: $seats
max_num_batched_tokens: $seats
kv_cache_memory_bytes: 270000000
"""
)


def limited(gib):
    """As `ulimit -d` in the job's script."""

    def decorate(function):
        def wrapper(*args):
            resource.setrlimit(resource.RLIMIT_DATA, (gib << 30, gib << 30))
            return function(*args)

        return wrapper

    return decorate


@limited(6)
@oomguard.guard(allow="reduces-capacity", pin=["max_model_len"])
def main(seats):
    llm = LLM(**yaml.safe_load(CONFIG.substitute(seats=seats)))
    outputs = llm.generate(["row 1", "row 2", "row 3"], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    print("tokens", [len(o.outputs[0].token_ids) for o in outputs])
    config = llm.llm_engine.vllm_config
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("INPROC-DONE")


if __name__ == "__main__":
    main(seats=16384)
