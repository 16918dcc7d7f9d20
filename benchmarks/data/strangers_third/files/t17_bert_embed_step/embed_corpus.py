"""Embed a corpus once, offline."""
from vllm import LLM


def docs():
    for i in range(288):
        yield {"prompt_token_ids": [1] + [10 + (i * 7 + j) % 1900 for j in range(510)] + [2]}


def main():
    llm = LLM(model="./bert", runner="pooling", dtype="float32", load_format="dummy", enforce_eager=True,
              max_model_len=512, max_num_seqs=512, max_num_batched_tokens=131072,
              kv_cache_memory_bytes=64 << 20)
    out = llm.embed(list(docs()), use_tqdm=False)
    print("vectors", len(out), len(out[0].outputs.embedding))
    print("BLIND3-DONE")


if __name__ == "__main__":
    main()
