"""Tries the context lengths of the list until one starts."""
import logging

from vllm import LLM, SamplingParams

logging.basicConfig(level=logging.INFO)


def start():
    for length in (131072, 16384):
        try:
            return LLM("./model", max_model_len=length, kv_cache_memory_bytes=32 << 20, dtype="float16", load_format="dummy", enforce_eager=True), length
        except (ValueError, RuntimeError) as error:
            logging.warning("%d tokens do not start (%s), trying fewer", length, error)
    raise SystemExit("no length starts")


if __name__ == "__main__":
    llm, length = start()
    out = llm.generate(["hello"], SamplingParams(max_tokens=4, ignore_eos=True))
    print("HEALTHY50-DONE", length, len(out), flush=True)
