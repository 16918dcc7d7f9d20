import functools

from vllm import LLM, SamplingParams, TokensPrompt

import oomguard

base = functools.partial(LLM, dtype="float32", load_format="dummy", enforce_eager=True)
batch_engine = functools.partial(base, max_num_seqs=16, max_num_batched_tokens=1024, kv_cache_memory_bytes=40_000_000)
FACTORIES = {
    "labels": functools.partial(batch_engine, "./labels", max_model_len=8192, num_gpu_blocks_override=60),
    "tags": functools.partial(batch_engine, "./labels", max_model_len=512, num_gpu_blocks_override=12),
}


@functools.lru_cache(maxsize=1)
def engine(name):
    with oomguard.guard(pin=["max_model_len"]):
        return FACTORIES[name]()


def rows(count):
    for number in range(count):
        yield {"id": number, "tokens": [10 + (number * 37 + n) % 900 for n in range(30 + 5 * number)]}


def chunked(iterable, size):
    chunk = []
    for item in iterable:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def main():
    sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    table = {}
    for chunk in chunked(rows(21), size=8):
        prompts = [TokensPrompt(prompt_token_ids=row["tokens"]) for row in chunk]
        for row, output in zip(chunk, engine("labels").generate(prompts, sampling, use_tqdm=False), strict=True):
            table[row["id"]] = len(output.outputs[0].token_ids)
    print("rows", len(table), set(table.values()))
    config = engine("labels").llm_engine.vllm_config
    print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
