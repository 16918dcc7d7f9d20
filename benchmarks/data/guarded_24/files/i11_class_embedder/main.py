import math

import oomguard


class Index:
    """Keeps the embedder in an attribute and finds the nearest text."""

    def __init__(self, path):
        from vllm import LLM

        with oomguard.guard(allow="reduces-capacity", floors={"max_model_len": 1024}, max_attempts=3):
            self.llm = LLM(
                model=path, runner="pooling", convert="embed", dtype="float16", load_format="dummy", enforce_eager=True, max_model_len=32768, kv_cache_memory_bytes=12 * 2**20
            )
        self.texts, self.vectors = [], []

    def add(self, texts):
        self.texts += texts
        self.vectors += [output.outputs.embedding for output in self.llm.embed(texts)]

    def nearest(self, text):
        query = self.llm.embed([text])[0].outputs.embedding
        return max(range(len(self.texts)), key=lambda i: sum(a * b for a, b in zip(query, self.vectors[i], strict=True)))


def main():
    index = Index("./embedder")
    index.add(["cats and dogs", "stocks and bonds", "rain and snow"])
    print("nearest:", index.texts[index.nearest("rain and snow")], "norm", round(math.hypot(*index.vectors[0]), 2))
    print("VALUE max_model_len", index.llm.llm_engine.vllm_config.model_config.max_model_len)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
