"""How likely is this text? Prints one number."""
import os
import resource

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main():
    share = int(os.environ.get("JOB_GIB", "16")) * 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (share, share))
    llm = LLM("./qwen", max_model_len=8192, max_num_seqs=4, kv_cache_memory_bytes=64 * 2**20, enable_prefix_caching=False,
              dtype="float16", load_format="dummy", enforce_eager=True, skip_tokenizer_init=True)
    text = TokensPrompt(prompt_token_ids=[(7 * j) % 150_000 + 5 for j in range(6000)])
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    (answer,) = llm.generate([text], params, use_tqdm=False)
    logs = [next(iter(p.values())).logprob for p in answer.prompt_logprobs if p]
    print("SCORED", len(answer.prompt_token_ids), all(x < 0 for x in logs), flush=True)


if __name__ == "__main__":
    main()
