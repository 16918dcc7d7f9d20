import resource
import traceback
from concurrent.futures import ThreadPoolExecutor

from vllm import LLM

import oomguard

FIXED = {"max_model_len": 131_072, "max_num_seqs": 8192, "max_num_batched_tokens": 8192}


@oomguard.guard(allow="reduces-capacity", pin=list(FIXED))
def start():
    return LLM(
        "./stadium", dtype="float16", load_format="dummy", enforce_eager=True, kv_cache_memory_bytes=150_000_000, **FIXED
    )


def main():
    resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))
    with ThreadPoolExecutor(max_workers=1) as pool:
        error = pool.submit(start).exception()
    if error is None:
        raise SystemExit("it started")
    text = "".join(traceback.format_exception(error))
    print("last line of vLLM's:", str(error).splitlines()[0])
    if not isinstance(error, RuntimeError) or "oomguard" not in "\n".join(getattr(error, "__notes__", [])):
        raise SystemExit(text)
    for name, value in FIXED.items():
        print("VALUE", name, value)
    print("VALUE kv_cache_memory_bytes", 150_000_000)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
