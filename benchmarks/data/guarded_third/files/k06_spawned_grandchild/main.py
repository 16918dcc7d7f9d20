"""A scheduler that gives every job a fresh interpreter, and gets plain numbers back."""
import multiprocessing
import traceback


def job(pipe, folder, texts):
    from vllm import LLM, SamplingParams

    import oomguard

    try:
        with oomguard.guard(allow="reduces-capacity"):
            llm = LLM(
                folder,
                max_model_len=12_000,
                max_num_seqs=10,
                kv_cache_memory_bytes=16 << 20,
                dtype="float16",
                load_format="dummy",
                enforce_eager=True,
            )
        outputs = llm.generate(texts, SamplingParams(max_tokens=7, ignore_eos=True), use_tqdm=False)
        config = llm.llm_engine.vllm_config
        pipe.send(
            {
                "tokens": [len(output.outputs[0].token_ids) for output in outputs],
                "max_model_len": config.model_config.max_model_len,
                "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
                "max_num_seqs": config.scheduler_config.max_num_seqs,
            }
        )
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        pipe.close()


def main():
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=job, args=(sender, "./legacy", ["a b c", "d e f"]))
    child.start()
    sender.close()
    result = receiver.recv()
    child.join()
    assert child.exitcode == 0, child.exitcode
    print("tokens", result.pop("tokens"))
    for name, value in result.items():
        print("VALUE", name, value)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
