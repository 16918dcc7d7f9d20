import os
import sys

from vllm import LLM
from vllm.exceptions import VLLMValidationError

LIMIT = int(os.environ["TRIAGE_LIMIT"])

if __name__ == "__main__":
    llm = LLM("./model", runner="pooling", max_model_len=LIMIT, max_num_batched_tokens=LIMIT, kv_cache_memory_bytes=24_000_000, dtype="float16", load_format="dummy", enforce_eager=True)
    exact = {"prompt_token_ids": [5 + i % 200 for i in range(LIMIT)]}
    try:
        llm.classify([{"prompt_token_ids": [7] * (LIMIT + 1)}])
    except VLLMValidationError as error:
        print("ERROR skipped one:", error, file=sys.stderr)
    found = llm.classify([exact, "short"])
    print("HEALTHY50-DONE", [len(o.outputs.probs) for o in found], flush=True)
