"""Start with the longest context that this machine takes."""
from vllm import LLM, SamplingParams


def start():
    for length in (4096, 2048, 1024):
        try:
            return length, LLM("./chat", max_model_len=length, kv_cache_memory_bytes=24 * 2**20, max_num_seqs=4,
                               dtype="float16", load_format="dummy", enforce_eager=True)
        except Exception as error:
            print(f"{length} does not fit here: {type(error).__name__}: {error}", flush=True)
    raise SystemExit("no length fits")


def main():
    length, llm = start()
    outs = llm.generate(["Good morning!", "Good night!"], SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
    print("LADDER", length, len(outs), [len(o.outputs[0].token_ids) for o in outs], flush=True)


if __name__ == "__main__":
    main()
