import gc

from vllm import LLM, SamplingParams

COMMON = dict(dtype="float16", load_format="dummy", enforce_eager=True)
SP = SamplingParams(max_tokens=4, ignore_eos=True)


def write(prompts):
    llm = LLM(model="./writer", max_model_len=2048, kv_cache_memory_bytes=64 << 20, **COMMON)
    print("WRITER", llm.llm_engine.model_config.max_model_len, flush=True)
    texts = [o.outputs[0].text for o in llm.generate(prompts, SP)]
    del llm
    gc.collect()
    return texts


def judge(texts):
    llm = LLM(model="./judge", max_model_len=32768, kv_cache_memory_bytes=10 << 20, **COMMON)
    print("JUDGE", llm.llm_engine.model_config.max_model_len, flush=True)
    return [len(o.outputs[0].token_ids) for o in llm.generate(texts, SP)]


if __name__ == "__main__":
    print("BLIND40-DONE", judge([t or "nothing" for t in write(["one", "two"])]), flush=True)
