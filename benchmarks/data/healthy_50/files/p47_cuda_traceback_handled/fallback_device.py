import logging
import sys
import traceback

import torch

logging.basicConfig(stream=sys.stderr, level=logging.INFO)


def embed_on_gpu():
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 3.25 GiB is free. "
        "Process 1 has 75.84 GiB memory in use. Of the allocated memory 74.90 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated.")


def main():
    try:
        embed_on_gpu()
    except torch.OutOfMemoryError:
        traceback.print_exc()
        logging.warning("the reranker does not fit the GPU, doing without it")
    with open("old.log") as f:
        sys.stderr.write(f.read())
    from vllm import LLM, SamplingParams

    llm = LLM("./model", max_model_len=2048, kv_cache_memory_bytes=32 << 20, dtype="float16", load_format="dummy", enforce_eager=True)
    out = llm.generate(["hello"], SamplingParams(max_tokens=4, ignore_eos=True))
    print("HEALTHY50-DONE", len(out), flush=True)


if __name__ == "__main__":
    main()
