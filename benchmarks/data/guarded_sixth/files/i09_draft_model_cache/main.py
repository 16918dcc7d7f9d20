from dataclasses import dataclass, field

from vllm import EngineArgs, LLMEngine, SamplingParams

import oomguard


@dataclass(slots=True)
class Writer:
    """A large model and the small one that drafts for it."""

    model: str
    drafts: str
    ahead: int = 3
    limits: dict = field(default_factory=dict)
    engine: LLMEngine | None = None

    def start(self):
        args = EngineArgs(
            model=self.model,
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
            speculative_config={"method": "draft_model", "model": self.drafts, "num_speculative_tokens": self.ahead},
            **self.limits,
        )
        with oomguard.guard(allow="reduces-capacity"):
            self.engine = LLMEngine.from_engine_args(args)
        return self

    def write(self, tasks):
        for name, (prompt, tokens) in tasks.items():
            self.engine.add_request(name, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0))
        done = {}
        while self.engine.has_unfinished_requests():
            done |= {o.request_id: len(o.outputs[0].token_ids) for o in self.engine.step() if o.finished}
        return done


if __name__ == "__main__":
    limits = dict(max_model_len=16_384, max_num_seqs=4, max_num_batched_tokens=1024, kv_cache_memory_bytes=26_000_000)
    writer = Writer("./author", "./sketch", limits=limits).start()
    done = writer.write({"a": ("once", 11), "b": ("there was a king who", 6), "c": ("finally", 20)})
    assert done == {"a": 11, "b": 6, "c": 20}, done
    config = writer.engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE num_speculative_tokens", config.speculative_config.num_speculative_tokens)
    print("INPROC-DONE")
