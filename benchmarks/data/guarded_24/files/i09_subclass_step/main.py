"""Our house LLM: defaults for the batch machine in one place."""
from vllm import LLM, SamplingParams

import oomguard


class BatchLLM(LLM):
    def __init__(self, model, **kwargs):
        kwargs.setdefault("dtype", "float32")
        kwargs.setdefault("max_num_batched_tokens", 400_000)  # "as large as possible"
        kwargs.setdefault("max_model_len", 4096)
        kwargs.setdefault("kv_cache_memory_bytes", 64 * 1024**2)
        super().__init__(model, load_format="dummy", **kwargs)
        self.name = model.strip("./")

    def complete(self, texts):
        return [o.outputs[0].token_ids for o in self.generate(texts, SamplingParams(max_tokens=8, ignore_eos=True))]


@oomguard.guard
def start():
    return BatchLLM("./novelist")


def main():
    llm = start()
    print(llm.name, [len(tokens) for tokens in llm.complete(["It was", "a dark", "and stormy night"])])
    print("VALUE max_num_batched_tokens", llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", llm.llm_engine.vllm_config.model_config.max_model_len)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
