import functools
import weakref

from vllm import LLM, SamplingParams

import oomguard


class Assistant:
    alive = weakref.WeakSet()

    def __init__(self, folder, **overrides):
        self.folder, self.overrides = folder, overrides
        self.alive.add(self)

    @functools.cached_property
    def llm(self):
        print("opening", self.folder)
        return LLM(self.folder, dtype="float16", load_format="dummy", enforce_eager=True, **self.overrides)

    @functools.singledispatchmethod
    def ask(self, question):
        raise NotImplementedError(type(question))

    @ask.register
    def _(self, question: str):
        return self.ask([question])

    @ask.register
    def _(self, question: list):
        sampling = SamplingParams(n=2, max_tokens=5, ignore_eos=True, temperature=0.7, seed=3)
        return [[len(c.token_ids) for c in o.outputs] for o in self.llm.generate(question, sampling, use_tqdm=False)]

    ask_safely = oomguard.guard(allow="reduces-capacity", pin=["max_num_seqs", "block_size"])(lambda self, q: self.ask(q))


def main():
    assistant = Assistant("./helper", kv_cache_memory_bytes=20_000_000, max_num_seqs=9)
    print("first", assistant.ask_safely("who are you"))  # this is where the engine is made
    print("second", assistant.ask(["where", "when"]))
    config = assistant.llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE block_size", config.cache_config.block_size)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
