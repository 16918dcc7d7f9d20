import resource
from dataclasses import dataclass

from vllm import LLM

import oomguard


@dataclass
class Hit:
    text: str
    score: float = 0.0


class Reranker:
    """What a search application calls with a query and the hits of its index."""

    def __init__(self, model, **kwargs):
        with oomguard.guard():
            self.llm = LLM(model, runner="pooling", **kwargs)

    def __call__(self, query, hits):
        outputs = self.llm.score(query, [hit.text for hit in hits], use_tqdm=False)
        for hit, output in zip(hits, outputs, strict=True):
            hit.score = output.outputs.score
        return sorted(hits, key=lambda hit: hit.score, reverse=True)


def main():
    resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))
    rerank = Reranker(
        "./reranker",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=64,
        max_num_batched_tokens=16384,
        kv_cache_memory_bytes=1_000_000,
    )
    print("few", len(rerank("what is a cat?", [Hit("an animal"), Hit("a unix command")])))
    page = "It is a long text about many things of this world. "
    hits = [Hit((f"{number}. " + page * 9)[:440]) for number in range(16)]
    print("many", len(rerank("what is a dog?", hits)))
    config = rerank.llm.llm_engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
