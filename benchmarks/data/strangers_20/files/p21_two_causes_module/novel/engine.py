from dataclasses import dataclass, asdict


@dataclass
class Settings:
    model: str = "./model"
    dtype: str = "float16"
    load_format: str = "dummy"
    max_model_len: int = 1_048_576
    max_num_batched_tokens: int = 1_048_576
    max_num_seqs: int = 2
    kv_cache_memory_bytes: int = 100 * 1024 * 1024


def build():
    from vllm import LLM

    return LLM(**asdict(Settings()), compilation_config={"mode": 2, "backend": "eager"})
