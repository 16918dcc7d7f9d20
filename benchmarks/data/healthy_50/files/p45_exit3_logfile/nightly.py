import logging
import sys

import numpy as np

logging.basicConfig(filename="nightly.log", level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
log = logging.getLogger("nightly")


def main():
    from vllm import LLM, SamplingParams

    try:
        table = np.ones((1 << 24, 1 << 24), dtype=np.float64)
    except MemoryError as error:
        log.error("no table of all pairs: %s", error)
        table = None
    llm = LLM(model="./model", max_model_len=2048, kv_cache_memory_bytes=32 << 20, dtype="float16", load_format="dummy", enforce_eager=True)
    outs = llm.generate(["a", "b"], SamplingParams(max_tokens=4, ignore_eos=True))
    log.info("%d answers, table %s", len(outs), table)
    print("HEALTHY50-DONE", len(outs), flush=True)
    return 3 if len(outs) < 3 else 0  # 3: fewer answers than we want, the scheduler knows it


if __name__ == "__main__":
    sys.exit(main())
