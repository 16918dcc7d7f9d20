import settings
from vllm import LLM


def build():
    return LLM(settings.MODEL, max_model_len=settings.CONTEXT, kv_cache_memory_bytes=settings.KV_BYTES, dtype="float16", load_format="dummy",
               enforce_eager=True, max_num_seqs=4)


if __name__ == "__main__":
    engine = build()
    print("ENGINE-UP", engine.llm_engine.model_config.max_model_len, flush=True)
