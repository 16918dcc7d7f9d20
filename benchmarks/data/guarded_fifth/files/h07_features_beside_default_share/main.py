import numpy as np
from vllm import LLM, SamplingParams

import oomguard


class Features:
    """All features of the products, in memory; they stay there for the whole job."""

    def __init__(self, rows=1_600_000, columns=1024):
        self.table = np.ones((rows, columns), dtype=np.float32)  # 6.1 GiB

    def describe(self, row):
        return f"The product's mean feature is {self.table[row].mean():.2f}. Describe it:"


def main():
    features = Features()
    with oomguard.guard():
        llm = LLM(
            "./catalog",
            max_model_len=4096,
            max_num_seqs=8,
            num_gpu_blocks_override=64,  # is plenty for short texts
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
        )
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    outputs = llm.generate([features.describe(row) for row in range(0, 1_600_000, 200_000)], sampling)
    print("descriptions", [len(output.outputs[0].token_ids) for output in outputs])
    config = llm.llm_engine.vllm_config
    print("VALUE gpu_memory_utilization", config.cache_config.gpu_memory_utilization)
    print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
