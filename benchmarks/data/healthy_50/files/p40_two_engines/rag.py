import gc

from vllm import LLM, SamplingParams

COMMON = dict(dtype="float16", load_format="dummy", enforce_eager=True)
TEXTS = ["the cat sat on the mat", "the bank raised its rates", "rain is expected"]


def nearest(question):
    llm = LLM("./embedder", runner="pooling", gpu_memory_utilization=0.4, **COMMON)
    vectors = [out.outputs.embedding for out in llm.embed([question, *TEXTS])]
    del llm
    gc.collect()
    return max(range(len(TEXTS)), key=lambda i: sum(a * b for a, b in zip(vectors[0], vectors[i + 1])))


def answer(text):
    llm = LLM("./writer", max_model_len=4096, kv_cache_memory_bytes=32 << 20, **COMMON)
    return len(llm.generate([text], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids)


if __name__ == "__main__":
    print("HEALTHY50-DONE", answer(TEXTS[nearest("weather?")]), flush=True)
