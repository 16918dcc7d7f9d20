import os

from vllm import LLM, SamplingParams

STEP = int(os.environ.get("STEP_TOKENS", "8192"))


def main():
    llm = LLM("./model", dtype="float32", load_format="dummy", enforce_eager=True, skip_tokenizer_init=True, max_model_len=32768,
              max_num_batched_tokens=STEP, kv_cache_memory_bytes=16 << 20, seed=0)
    prompt = {"prompt_token_ids": [i % 4000 for i in range(26000)]}
    out = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False))[0]
    print("BLIND40-DONE", len(out.prompt_logprobs), flush=True)


if __name__ == "__main__":
    main()
