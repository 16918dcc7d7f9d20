from vllm import LLM, SamplingParams

DEFAULTS = {"dtype": "float16", "load_format": "dummy", "enforce_eager": True, "gpu_memory_utilization": 0.95, "max_model_len": 40960}
CONFIG = {**DEFAULTS, "kv_cache_memory_bytes": 64 * 1024**2, "max_model_len": 4096}


def main():
    llm = LLM("./model", **CONFIG)
    sp = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=6, ignore_eos=True)
    turns = [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "What does CUDA out of memory mean?"}]
    first = llm.chat(turns, sp, use_tqdm=False)[0].outputs[0]
    turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Again, please."}]
    second = llm.chat([turns, turns[:2]], sp)
    print("HEALTHY50-DONE", len(first.token_ids), len(second), flush=True)


if __name__ == "__main__":
    main()
