import abc
import math

from vllm import LLM, TokensPrompt

import oomguard


class Encoder(abc.ABC):
    registry = {}

    def __init_subclass__(cls, *, key, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.registry[key] = cls

    @abc.abstractmethod
    def encode(self, rows): ...


class Dense(Encoder, key="dense"):
    def __new__(cls, **kwargs):
        self = super().__new__(cls)
        with oomguard.guard(allow="reduces-capacity", pin=("max_num_seqs", "max_num_batched_tokens")):
            self.llm = LLM(runner="pooling", convert="embed", **kwargs)
        return self

    def __init__(self, **kwargs):
        self.size = self.llm.llm_engine.vllm_config.model_config.get_hidden_size()

    def encode(self, rows):
        return [o.outputs.embedding for o in self.llm.embed([TokensPrompt(prompt_token_ids=r) for r in rows], use_tqdm=False)]


def main():
    encoder = Encoder.registry["dense"](
        model="./matcher",
        max_model_len=32768,
        max_num_seqs=8,
        max_num_batched_tokens=32768,
        kv_cache_memory_bytes=10_000_000,
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
    )
    vectors = encoder.encode([[7, 8, 9], [10] * 40, list(range(20, 90))])
    print("vectors", len(vectors), {len(v) == encoder.size for v in vectors}, all(map(math.isfinite, vectors[0])))
    config = encoder.llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
