import enum
import logging
import resource
import sys

from vllm import LLM, SamplingParams

import oomguard

log = logging.getLogger("classroom")


class Load(enum.Enum):
    QUIET = 8
    CLASS = 512  # one seat a pupil, two schools

    @property
    def engine(self):
        return {"max_num_seqs": self.value, "max_num_batched_tokens": max(2048, self.value)}


class Classroom:
    def __init__(self, load):
        self.load = load
        self.llm = self._open()

    @oomguard.guard(allow="reduces-capacity", pin=["max_model_len"])
    def _open(self):
        return LLM(
            "./pupil",
            max_model_len=1024,
            kv_cache_memory_bytes=48_000_000,
            dtype="float16",
            load_format="dummy",
            compilation_config={"mode": 2, "backend": "eager"},
            **self.load.engine,
        )

    def ask(self, questions):
        sampling = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
        return [len(o.outputs[0].token_ids) for o in self.llm.generate(questions, sampling, use_tqdm=False)]


def main():
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING)
    resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))
    room = Classroom(Load.CLASS)
    print("answers", room.ask(["2 + 2", "3 + 3", "what is a verb"]))
    config = room.llm.llm_engine.vllm_config
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
