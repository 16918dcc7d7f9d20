"""The engine is built and used in a worker thread; the main thread stays responsive."""
import time
from concurrent.futures import ThreadPoolExecutor

from vllm import LLM, SamplingParams

import oomguard


@oomguard.guard(allow="reduces-capacity")
def work(prompts):
    llm = LLM("./model", dtype="float32", load_format="dummy", enforce_eager=True, max_model_len=50_000, max_num_seqs=4, kv_cache_memory_bytes=64 * 2**20)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    return [len(o.outputs[0].token_ids) for o in outputs], llm.llm_engine.vllm_config.model_config.max_model_len


def main():
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine") as pool:
        future = pool.submit(work, ["a red apple", "a green pear"])
        beats = 0
        while not future.done():
            time.sleep(0.2)
            beats += 1
        lengths, max_model_len = future.result()
    print("heartbeats", beats > 0, "lengths", lengths)
    print("VALUE max_model_len", max_model_len)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
