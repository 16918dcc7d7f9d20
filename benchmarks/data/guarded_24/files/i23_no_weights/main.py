"""The download of the weights was broken off: the folder holds the configuration only."""
from vllm import LLM, SamplingParams

import oomguard


def main():
    try:
        with oomguard.guard(allow="reduces-capacity") as g:
            llm = LLM("./half-downloaded", dtype="float16", enforce_eager=True, max_model_len=4096, max_num_seqs=4, kv_cache_memory_bytes=64 * 2**20)
    except Exception as error:
        print("attempts", len(g.attempts))
        print("CAUGHT", type(error).__name__)
        return
    print(len(llm.generate("Hello", SamplingParams(max_tokens=4))))
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
