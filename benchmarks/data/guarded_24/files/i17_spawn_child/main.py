"""One process for each shard of the data, as on the big machine (here: one shard)."""
import multiprocessing

SHARDS = [["first document", "second document"]]


def worker(rank, documents, results):
    from vllm import LLM, SamplingParams

    import oomguard

    with oomguard.guard():
        llm = LLM(
            "./mistral",
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=32768,
            max_num_batched_tokens=16384,
            max_num_seqs=8,
            kv_cache_memory_bytes=20 * 2**20,
        )
    outputs = llm.generate(documents, SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    config = llm.llm_engine.vllm_config
    results.put((rank, [len(o.outputs[0].token_ids) for o in outputs], config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len))


def main():
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=worker, args=(rank, documents, results)) for rank, documents in enumerate(SHARDS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a shard failed")
    for _ in processes:
        rank, lengths, step, length = results.get(timeout=10)
        print("shard", rank, lengths)
        print("VALUE max_num_batched_tokens", step)
        print("VALUE max_model_len", length)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
