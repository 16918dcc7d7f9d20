import resource
from contextlib import ExitStack

from vllm import LLM, SamplingParams, TokensPrompt

import oomguard


def document(length, salt):
    return TokensPrompt(prompt_token_ids=[5 + (salt * 977 + n * 31) % 2000 for n in range(length)])


def batches():
    yield [document(12, 1), document(20, 2)]  # works
    yield [document(6500, 3), document(300, 4)]  # the one that nobody had tried
    yield [document(9, 5)]


def main():
    resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    stack = ExitStack()
    stack.enter_context(oomguard.guard())
    llm = LLM(
        "./reader",
        max_model_len=8192,
        max_num_seqs=4,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=16_000_000,
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
    )
    stack.close()
    sampling = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
    for number, batch in enumerate(batches(), start=1):
        outputs = llm.generate(batch, sampling, use_tqdm=False)
        print("batch", number, [len(o.outputs[0].token_ids) for o in outputs])
    config = llm.llm_engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
