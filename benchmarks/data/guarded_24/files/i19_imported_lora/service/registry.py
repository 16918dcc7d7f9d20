"""The engine of the service: built at the first call, kept for all others."""
import functools

import oomguard

SETTINGS = {
    "model": "./base",
    "dtype": "float16",
    "load_format": "dummy",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 16 * 2**20,
    "enable_lora": True,
    "max_loras": 128,  # one slot a customer
    "max_lora_rank": 512,
}


@functools.lru_cache(maxsize=1)
def engine():
    from vllm import LLM

    with oomguard.guard(allow="reduces-capacity", pin=["max_lora_rank"]):
        return LLM(**SETTINGS)


def complete(prompt, tokens):
    from vllm import SamplingParams

    return engine().generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids
