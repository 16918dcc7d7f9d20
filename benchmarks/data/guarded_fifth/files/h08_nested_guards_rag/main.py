"""Retrieval and generation in one process: an encoder for the passages, a writer for the answer."""

from vllm import LLM, SamplingParams

import oomguard

PASSAGES = ["The library opens at nine.", "Books are lent for four weeks.", "Late returns cost a euro a week."]
COMMON = {"load_format": "dummy", "enforce_eager": True}


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


class Rag:
    def __init__(self):
        with oomguard.guard(pin=["max_model_len", "max_num_seqs"]):  # of the retriever nothing may change
            self.retriever = LLM(
                "./retriever", runner="pooling", dtype="float32", max_model_len=256, kv_cache_memory_bytes=1_000_000, **COMMON
            )
            with oomguard.guard(allow="reduces-capacity", floors={"max_model_len": 3000, "max_num_seqs": 4}):
                self.writer = LLM(
                    "./writer",
                    dtype="float16",
                    max_model_len=12288,
                    max_num_seqs=4,
                    kv_cache_memory_bytes=6_000_000,
                    **COMMON,
                )
        self.vectors = [output.outputs.embedding for output in self.retriever.embed(PASSAGES, use_tqdm=False)]

    def ask(self, question):
        vector = self.retriever.embed([question], use_tqdm=False)[0].outputs.embedding
        best = max(range(len(PASSAGES)), key=lambda n: dot(vector, self.vectors[n]))
        prompt = f"{PASSAGES[best]}\n\nQuestion: {question}\nAnswer:"
        return self.writer.generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)[0]


def main():
    rag = Rag()
    for question in ("When can I come?", "What does it cost to be late?"):
        print(question, len(rag.ask(question).outputs[0].token_ids))
    assert rag.retriever.llm_engine.vllm_config.model_config.max_model_len == 256
    config = rag.writer.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
