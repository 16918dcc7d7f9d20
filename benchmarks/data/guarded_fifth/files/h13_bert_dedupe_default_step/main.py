"""Finds near-duplicates among support tickets by their vectors."""

import math
import resource
from itertools import combinations

from vllm import LLM

import oomguard

MEMORY = 3 << 30  # what the batch queue grants


class Deduplicator:
    def __init__(self, llm):
        self.llm = llm

    @classmethod
    @oomguard.guard(pin=["max_model_len"])
    def load(cls, model):
        llm = LLM(
            model,
            runner="pooling",
            max_model_len=512,
            max_num_seqs=32,
            kv_cache_memory_bytes=1_000_000,  # an encoder has none
            dtype="float32",
            load_format="dummy",
            enforce_eager=True,
        )
        return cls(llm)

    def vectors(self, texts):
        outputs = self.llm.embed(texts, use_tqdm=True)
        return [output.outputs.embedding for output in outputs]

    def pairs(self, texts, threshold=0.9999):
        vectors = self.vectors(texts)
        for (a, va), (b, vb) in combinations(enumerate(vectors), 2):
            cosine = sum(x * y for x, y in zip(va, vb)) / (math.hypot(*va) * math.hypot(*vb))
            if cosine > threshold:
                yield a, b


def tickets(count):
    for number in range(count):
        words = [f"{(number // 2 * 31 + n * 7) % 977:03d}" for n in range(100)]
        yield " ".join(words)


def main():
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    dedupe = Deduplicator.load("./tickets")
    print("short", len(dedupe.vectors(["printer", "monitor"])))
    found = list(dedupe.pairs(list(tickets(40))))
    print("pairs", len(found))
    assert len(found) >= 20
    config = dedupe.llm.llm_engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
