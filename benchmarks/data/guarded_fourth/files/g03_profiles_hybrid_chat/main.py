import json
from pathlib import Path

from vllm import LLM, SamplingParams

import oomguard

HERE = Path(__file__).parent


def profile(name):
    """A profile of profiles.json, on top of the one that it extends."""
    profiles = json.loads((HERE / "profiles.json").read_text())
    chosen = dict(profiles[name])
    base = chosen.pop("extends", None)
    return {**(profile(base) if base else {}), **chosen}


class ChatBot:
    def __init__(self, name):
        self.engine_kwargs = profile(name)
        self.history = []
        with oomguard.guard(allow="reduces-capacity", pin=["max_num_batched_tokens"]) as self.watch:
            self.llm = LLM(**self.engine_kwargs)

    def say(self, text):
        self.history.append({"role": "user", "content": text})
        sampling = SamplingParams(max_tokens=10, temperature=0.7, seed=1, ignore_eos=True)
        output = self.llm.chat(self.history, sampling, use_tqdm=False)[0].outputs[0]
        self.history.append({"role": "assistant", "content": output.text})
        return len(output.token_ids)


if __name__ == "__main__":
    bot = ChatBot("long-context")
    print("turns", [bot.say("hello"), bot.say("and now something longer, please"), bot.say("bye")])
    config = bot.llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("INPROC-DONE")
