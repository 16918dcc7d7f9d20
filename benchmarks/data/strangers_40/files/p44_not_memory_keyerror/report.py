import logging

from vllm import LLM, SamplingParams

logging.basicConfig(level=logging.INFO)

if __name__ == "__main__":
    llm = LLM("./model", max_model_len=2048, kv_cache_memory_bytes=16 << 20, dtype="float16", load_format="dummy", enforce_eager=True)
    out = llm.generate(["summarise: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"], SamplingParams(max_tokens=4, ignore_eos=True))
    logging.info("last week's incident was: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB")
    prices = {"us": 1.0}
    print("BLIND40-DONE", prices["de"] * len(out), flush=True)
