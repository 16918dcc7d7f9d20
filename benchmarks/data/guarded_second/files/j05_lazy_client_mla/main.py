import functools
from typing import Any

from vllm import LLM, SamplingParams

import oomguard


class BaseLLM:
    """What the framework offers: subclasses say how one prompt is completed."""

    def invoke(self, text: str) -> str:
        return self._call(text)

    def batch(self, texts: list[str]) -> list[str]:
        return [self.invoke(text) for text in texts]


class LocalVLLM(BaseLLM):
    def __init__(self, model: str, max_new_tokens: int = 16, vllm_kwargs: dict[str, Any] | None = None):
        self.model, self.max_new_tokens, self.vllm_kwargs = model, max_new_tokens, vllm_kwargs or {}

    @functools.cached_property
    def client(self) -> LLM:
        with oomguard.guard(allow="reduces-capacity"):
            return LLM(model=self.model, **self.vllm_kwargs)

    def _call(self, text: str) -> str:
        sampling = SamplingParams(max_tokens=self.max_new_tokens, ignore_eos=True, temperature=0)
        return self.client.generate([text], sampling, use_tqdm=False)[0].outputs[0].text


def main():
    chain = LocalVLLM(
        "./coder-lite",
        max_new_tokens=8,
        vllm_kwargs={"max_model_len": 20_000, "kv_cache_memory_bytes": 24_000_000, "dtype": "float16", "load_format": "dummy", "enforce_eager": True, "max_num_seqs": 4},
    )
    print("replies", len(chain.batch(["def add(a, b):", "class Stack:"])))
    config = chain.client.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
