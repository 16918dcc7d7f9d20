import functools
import time

from vllm import LLM, SamplingParams

import oomguard


def retry(times, wait):
    """The retry helper that every code base has."""

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            for left in reversed(range(times)):
                wrapper.calls += 1
                try:
                    return function(*args, **kwargs)
                except Exception as error:
                    print("failed", type(error).__name__, "retries left", left)
                    if not left:
                        raise
                    time.sleep(wait)

        wrapper.calls = 0
        return wrapper

    return decorate


@retry(times=2, wait=1)
@oomguard.guard(allow="reduces-capacity")
def connect(model, context):
    engine = dict(dtype="float16", load_format="dummy", enforce_eager=True, block_size=64)
    return LLM(model, tokenizer=model, max_model_len=context, max_num_seqs=20, kv_cache_memory_bytes=30_000_000, **engine)


def main():
    llm = connect("./archive", context=100_000)
    outputs = llm.generate(["page 1", "page 2", "page 3"], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
    print("tokens", [len(o.outputs[0].token_ids) for o in outputs], "calls", connect.calls)
    config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE block_size", config.cache_config.block_size)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
