"""Score one prompt of 8191 tokens in one step: the logits of all its tokens over 128256 words, and their copies."""

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        "./scored",
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=16384,
        max_num_seqs=8,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=64 << 20,
    )
    prompt = {"prompt_token_ids": [1 + i % 1000 for i in range(8191)]}
    scored = llm.generate(
        [prompt], SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    )
    print("SCORED", len(scored[0].prompt_logprobs), flush=True)
