"""One factory for all our engines."""
from vllm import LLM

import oomguard

PROFILES = {
    "extract": {"model": "./extractor", "max_model_len": 131072, "max_num_seqs": 60_000, "max_num_batched_tokens": 65_536, "kv_cache_memory_bytes": 300 * 1024**2},
    "short": {"model": "./extractor", "max_model_len": 2048, "kv_cache_memory_bytes": 32 * 1024**2},
}


@oomguard.guard(allow="reduces-capacity", pin=["max_model_len"])
def make_engine(profile):
    return LLM(dtype="float16", load_format="dummy", enforce_eager=True, **PROFILES[profile])
