import resource
from collections import Counter

from vllm import LLM, SamplingParams

import oomguard

LIMIT_MIB = 1600


class Poet:
    def __init__(self):
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_MIB << 20, LIMIT_MIB << 20))
        with oomguard.guard():
            self.llm = LLM(
                "./poet",
                dtype="float16",
                load_format="dummy",
                enforce_eager=True,
                max_model_len=512,
                kv_cache_memory_bytes=20_000_000,
            )

    def verses(self, words):
        sampling = SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.1, top_p=0.9, top_k=400)
        return self.llm.generate([f"{word}:" for word in words], sampling, use_tqdm=False)


def main():
    poet = Poet()
    (trial,) = poet.verses(["sea"])
    assert len(trial.outputs[0].token_ids) == 3
    words = [f"word{n}" for n in range(256)]
    outputs = poet.verses(words)
    assert [output.prompt for output in outputs] == [f"{word}:" for word in words]
    assert Counter(len(output.outputs[0].token_ids) for output in outputs) == {3: 256}
    config = poet.llm.llm_engine.vllm_config
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
