"""Digest of one long document."""
from vllm import LLM, SamplingParams


def main():
    llm = LLM(
        model="./bot",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=4096,
        kv_cache_memory_bytes=512 * 1024 * 1024,
    )
    doc = [7 + i % 900 for i in range(5200)]
    out = llm.generate([{"prompt_token_ids": doc}], SamplingParams(max_tokens=16))
    print("DIGEST", len(out[0].outputs[0].token_ids))


if __name__ == "__main__":
    main()
