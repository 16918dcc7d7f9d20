"""Retrieval index and generator in one process."""
import numpy as np


def main():
    index = np.ones((786432, 2048), dtype=np.float32)  # 6 GiB of vectors
    from vllm import LLM, SamplingParams
    llm = LLM(model="./lm", dtype="float16", load_format="dummy", enforce_eager=True, max_model_len=8192,
              max_num_seqs=8, gpu_memory_utilization=0.9, num_gpu_blocks_override=256)
    q = index[::100000].sum(axis=1)
    out = llm.generate([{"prompt_token_ids": [1] + [5 + i] * 40} for i in range(len(q))],
                       SamplingParams(max_tokens=4), use_tqdm=False)
    print("answers", len(out), "index", index.shape)
    print("BLIND3-DONE")


if __name__ == "__main__":
    main()
