"""The engine works; the prompt is longer than its context."""
from vllm import LLM, SamplingParams

import oomguard


def main():
    log = "ERROR worker died: out of memory. " * 400  # what the user wants explained: about 13,600 tokens
    llm = None
    try:
        with oomguard.guard(allow="reduces-capacity"):
            llm = LLM("./explainer", dtype="float16", load_format="dummy", enforce_eager=True, max_model_len=2048, max_num_seqs=4, kv_cache_memory_bytes=16 * 2**20)
            llm.generate(f"Explain this log: {log}", SamplingParams(max_tokens=16))
    except Exception as error:
        print("VALUE max_model_len", llm.llm_engine.vllm_config.model_config.max_model_len)
        print("CAUGHT", type(error).__name__)
        return
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
