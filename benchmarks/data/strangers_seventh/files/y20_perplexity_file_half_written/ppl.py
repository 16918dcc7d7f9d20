"""Perplexity of documents; one line a document, as soon as it is known."""
import json
import math
import resource

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

LENGTHS = (60, 300, 3500, 120)


def main():
    resource.setrlimit(resource.RLIMIT_DATA, (4 * 2**30,) * 2)
    llm = LLM("./words", max_model_len=4096, max_num_seqs=4, max_num_batched_tokens=4096, enable_prefix_caching=False,
              kv_cache_memory_bytes=64 * 2**20, dtype="float16", load_format="dummy", enforce_eager=True,
              skip_tokenizer_init=True)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    with open("ppl.jsonl", "a") as out:
        for number, length in enumerate(LENGTHS):
            tokens = [(31 * number + 7 * j) % 200_000 + 5 for j in range(length)]
            (answer,) = llm.generate([TokensPrompt(prompt_token_ids=tokens)], params, use_tqdm=False)
            logs = [next(iter(p.values())).logprob for p in answer.prompt_logprobs if p]
            out.write(json.dumps({"doc": number, "tokens": length, "ppl": math.exp(-sum(logs) / len(logs))}) + "\n")
            out.flush()
    print("PERPLEXITIES", len(LENGTHS), flush=True)


if __name__ == "__main__":
    main()
