import contextlib
import os

from vllm import LLM, SamplingParams

import oomguard


@contextlib.contextmanager
def environment(**values):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def main():
    asked = {"max_model_len": 2048, "max_num_seqs": 4, "kv_cache_memory_bytes": 200_000_000}
    with environment(VLLM_CPU_KVCACHE_SPACE="64"), oomguard.guard(allow="reduces-capacity", max_attempts=5):
        try:
            llm = LLM("./relic", dtype="float16", load_format="dummy", enforce_eager=True, **asked)
        except RuntimeError as error:
            print("engine's own", "Engine core initialization failed" in str(error))
            print("variable", os.environ["VLLM_CPU_KVCACHE_SPACE"])
            for name, value in asked.items():
                print("VALUE", name, value)
            print("UNFIXED", type(error).__name__)
            raise
    print(llm.generate("never", SamplingParams(max_tokens=2), use_tqdm=False))
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
