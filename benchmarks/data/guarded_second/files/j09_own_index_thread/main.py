import concurrent.futures

import numpy as np
from vllm import LLM, SamplingParams

import oomguard


class Index:
    """1.4 million vectors of 1024 floats, held by this process."""

    def __init__(self, rows=1_400_000):
        self.vectors = np.ones((rows, 1024), dtype=np.float32)

    def nearest(self, number):
        return int(np.argmax(self.vectors[:1000] @ np.full(1024, number, dtype=np.float32)))


@oomguard.guard
def start_engine(path):
    return LLM(path, dtype="float16", load_format="dummy", enforce_eager=True, max_model_len=4096, gpu_memory_utilization=0.85, num_gpu_blocks_override=160, max_num_seqs=24)


def main():
    index = Index()
    with concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader") as pool:
        llm = pool.submit(start_engine, "./finder").result()
    prompts = [f"Document {index.nearest(n)} says" for n in range(1, 4)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True))
    print("answers", len(outputs))
    config = llm.llm_engine.vllm_config
    print("VALUE gpu_memory_utilization", config.cache_config.gpu_memory_utilization)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
