"""Two engines of one model in one script: the second one's length does not fit, the first one's is needed."""

from vllm import LLM, SamplingParams

COMMON = {"model": "./tiny", "enforce_eager": True, "dtype": "float16"}


def main() -> None:
    one = LLM(max_model_len=5000, kv_cache_memory_bytes=8_000_000, **COMMON)
    two = LLM(max_model_len=32768, kv_cache_memory_bytes=1_000_000, **COMMON)
    lengths = [llm.llm_engine.model_config.max_model_len for llm in (one, two)]
    prompt = {"prompt_token_ids": [5] * 4500}
    (output,) = one.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
    print("RESULT", lengths, len(output.outputs[0].token_ids))


if __name__ == "__main__":
    main()
