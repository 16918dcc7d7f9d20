import concurrent.futures
import queue

from vllm import LLM, SamplingParams

import oomguard

events = queue.SimpleQueue()


@oomguard.guard(allow="reduces-capacity", on_patch=events.put)
def open_engine(folder, **kwargs):
    return LLM(model=folder, dtype="float16", load_format="dummy", enforce_eager=True, seed=7, **kwargs)


def values(llm):
    config = llm.llm_engine.vllm_config
    yield "max_model_len", config.model_config.max_model_len
    yield "kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes
    yield "max_num_seqs", config.scheduler_config.max_num_seqs
    yield "seed", config.model_config.seed


def main():
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="engine") as pool:
        llm = pool.submit(open_engine, "./poet", kv_cache_memory_bytes=9_000_000, max_num_seqs=8).result()
        lines = pool.map(lambda text: llm.generate(text, sampling, use_tqdm=False)[0], ["Oh", "thou", "moon"])
        print("tokens", [len(line.outputs[0].token_ids) for line in lines])
    print("patches", events.qsize())
    for name, value in values(llm):
        print("VALUE", name, value)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
