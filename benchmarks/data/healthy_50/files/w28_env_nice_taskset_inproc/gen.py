import os

from vllm import LLM, SamplingParams

CTX = int(os.environ.get("CTX", "2048"))

llm = LLM("./model", max_model_len=CTX, kv_cache_memory_bytes=32 << 20, dtype="float16", load_format="dummy", enforce_eager=True)
for out in llm.generate(["one", "two", "three"], SamplingParams(max_tokens=5, ignore_eos=True)):
    print(len(out.outputs[0].token_ids))
print("HEALTHY50-DONE", CTX)
