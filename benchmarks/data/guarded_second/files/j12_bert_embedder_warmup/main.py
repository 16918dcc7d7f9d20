import dataclasses

from vllm import LLM

import oomguard


@dataclasses.dataclass
class Embedder:
    path: str
    tokens_a_step: int = 1_200_000
    llm: LLM = dataclasses.field(init=False)

    def __post_init__(self):
        self.llm = LLM(self.path, runner="pooling", dtype="float32", load_format="dummy", gpu_memory_utilization=0.5, max_num_batched_tokens=self.tokens_a_step, max_num_seqs=512)

    def __call__(self, texts):
        return [output.outputs.embedding for output in self.llm.embed(texts)]


def main():
    with oomguard.guard() as g:
        embed = Embedder("./minibert")
    vectors = embed(["a short text", "another text", "and a third one"])
    print("vectors", len(vectors), len(vectors[0]))
    config = embed.llm.llm_engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE gpu_memory_utilization", config.cache_config.gpu_memory_utilization)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
