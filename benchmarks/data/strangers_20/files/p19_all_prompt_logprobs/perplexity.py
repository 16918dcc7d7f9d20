import argparse

from vllm import LLM, SamplingParams


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=512)
    n = parser.parse_args().tokens
    llm = LLM("./model", dtype="float32", load_format="dummy", enforce_eager=True, skip_tokenizer_init=True, max_model_len=32768,
              max_num_batched_tokens=1024, kv_cache_memory_bytes=16 << 20, max_logprobs=-1)
    prompt = {"prompt_token_ids": [(7 * i) % 5000 for i in range(n)]}
    out = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False))[0]
    print("BLIND20-DONE", len(out.prompt_logprobs), flush=True)


if __name__ == "__main__":
    main()
