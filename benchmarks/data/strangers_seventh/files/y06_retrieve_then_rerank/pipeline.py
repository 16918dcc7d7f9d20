"""Embed, then rerank: two pooling engines in one program."""
import argparse

from vllm import LLM
from vllm.inputs import TokensPrompt

QUICK = {"dtype": "float16", "load_format": "dummy", "enforce_eager": True, "max_num_seqs": 8}


class Retriever:
    def __init__(self, path: str):
        self.llm = LLM(path, runner="pooling", convert="embed", max_model_len=2048,
                       kv_cache_memory_bytes=200 * 2**20, **QUICK)

    def top(self, docs: list[list[int]], n: int) -> list[list[int]]:
        vectors = [o.outputs.embedding for o in self.llm.embed([TokensPrompt(prompt_token_ids=d) for d in docs])]
        order = sorted(range(len(docs)), key=lambda i: -vectors[i][0])
        return [docs[i] for i in order[:n]]


class Reranker:
    def __init__(self, path: str, kv: int):
        self.llm = LLM(path, runner="pooling", kv_cache_memory_bytes=kv, **QUICK)

    def scores(self, docs: list[list[int]]) -> list[float]:
        return [o.outputs.probs[0] for o in self.llm.classify([TokensPrompt(prompt_token_ids=d) for d in docs])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rerank-kv-mib", type=int, default=20)
    args = parser.parse_args()
    retriever = Retriever("./embedder")
    reranker = Reranker("./reranker", args.rerank_kv_mib * 2**20)
    docs = [[(7 * i + j) % 1500 + 10 for j in range(200 + 150 * i)] for i in range(6)]
    best = retriever.top(docs, 3)
    print("RERANKED", len(reranker.scores(best)), "of", len(docs), flush=True)


if __name__ == "__main__":
    main()
