from vllm import LLM, SamplingParams

SHARED = {"dtype": "float16", "load_format": "dummy", "enforce_eager": True, "max_num_seqs": 4}
ENGINES = {
    "chat": {"model": "./chat", "max_model_len": 3072, "kv_cache_memory_bytes": 32 * 2**20},
    "embed": {"model": "./emb", "runner": "pooling", "convert": "embed", "max_model_len": 32768, "kv_cache_memory_bytes": 24 * 2**20},
    "rewrite": {"model": "./small", "max_model_len": 1024, "kv_cache_memory_bytes": 16 * 2**20},
}


def main():
    engines = {}
    for name, settings in ENGINES.items():
        engines[name] = LLM(**settings, **SHARED)
        print("ENGINE", name, engines[name].llm_engine.model_config.max_model_len, flush=True)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    query = engines["rewrite"].generate(["where is it?"], greedy)[0].outputs[0].text
    vectors = engines["embed"].embed(["passage one", "passage two", query or "nothing"])
    answer = engines["chat"].generate(["answer it"], greedy)[0].outputs[0]
    print("BLIND20-DONE", len(vectors), len(answer.token_ids), flush=True)


if __name__ == "__main__":
    main()
