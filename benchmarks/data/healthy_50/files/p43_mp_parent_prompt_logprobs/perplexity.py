import multiprocessing as mp
import os

STEP = int(os.environ.get("STEP_TOKENS", "16384"))


def child(texts, queue):
    from vllm import LLM, SamplingParams

    llm = LLM("./model", dtype="float16", load_format="dummy", enforce_eager=True, max_model_len=8192, max_num_batched_tokens=STEP, kv_cache_memory_bytes=64 << 20,
              enable_prefix_caching=False)
    outs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    queue.put([len(o.prompt_logprobs) for o in outs])


if __name__ == "__main__":
    ctx = mp.get_context("spawn")
    queue = ctx.Queue()
    worker = ctx.Process(target=child, args=(["abc " * 500, "def " * 1500], queue), name="scorer")
    worker.start()
    found = queue.get(timeout=240)
    worker.join()
    print("HEALTHY50-DONE", found, worker.exitcode, flush=True)
