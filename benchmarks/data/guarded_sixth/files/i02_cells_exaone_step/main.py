"""A notebook, exported: every cell is a function, what it makes is a global."""

import random

from vllm import LLM, SamplingParams

import oomguard


def cell_1():
    global llm, watch
    changed = []
    with oomguard.guard(on_patch=changed.append) as watch:
        llm = LLM(
            model="./paralegal",
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=49_152,  # the whole file of a case
            max_num_seqs=4,
            max_num_batched_tokens=8192,
            kv_cache_memory_bytes=62_000_000,
        )


def cell_2():
    global prompts
    random.seed(11)
    prompts = [{"prompt_token_ids": [random.randrange(5, 1500) for _ in range(n)]} for n in (40, 5200, 333)]


def cell_3():
    global outputs
    outputs = llm.generate(prompts, SamplingParams(max_tokens=6, min_tokens=6, temperature=0), use_tqdm=False)


def cell_4():
    assert len(outputs) == len(prompts)
    for prompt, output in zip(prompts, outputs):
        assert list(output.prompt_token_ids) == prompt["prompt_token_ids"]
        assert len(output.outputs) == 1 and len(output.outputs[0].token_ids) == 6


def cell_5():
    config = llm.llm_engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    for cell in (cell_1, cell_2, cell_3, cell_4, cell_5):
        cell()
    print("INPROC-DONE")
