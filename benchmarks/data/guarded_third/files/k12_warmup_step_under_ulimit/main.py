import os
import resource

from vllm import LLM, SamplingParams

import oomguard


def be_nice_to_colleagues(gib):
    """The cluster's rule: no process of ours takes more than its part of private memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (gib << 30, gib << 30))
    os.nice(1)


class Translator:
    settings = dict(max_model_len=4096, max_num_seqs=16, max_num_batched_tokens=16384, kv_cache_memory_bytes=32_000_000)

    def __init__(self):
        with oomguard.guard():
            self.llm = LLM(
                "./translator",
                dtype="float16",
                load_format="dummy",
                compilation_config={"mode": 2, "backend": "eager"},
                **self.settings,
            )

    def __call__(self, *texts):
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        return [len(o.outputs[0].token_ids) for o in self.llm.generate(list(texts), sampling, use_tqdm=False)]


if __name__ == "__main__":
    be_nice_to_colleagues(gib=4)
    translate = Translator()
    print("tokens", translate("eins", "zwei"))
    config = translate.llm.llm_engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("INPROC-DONE")
