from functools import cached_property

from vllm import LLM, SamplingParams

import oomguard


class Summarizer:
    """Makes its engine when it is first needed."""

    def __init__(self, model, context=6000, blocks=40):
        self.model, self.context, self.blocks = model, context, blocks

    @cached_property
    def llm(self):
        return self._load()

    @oomguard.guard(pin=["max_model_len", "max_num_seqs"])
    def _load(self):
        return LLM(
            self.model,
            tokenizer=self.model,
            max_model_len=self.context,
            max_num_seqs=4,
            num_gpu_blocks_override=self.blocks,
            gpu_memory_utilization=0.3,
            dtype="float32",
            load_format="dummy",
            enforce_eager=True,
            seed=0,
        )

    def __call__(self, text):
        sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        (output,) = self.llm.generate([f"Summarize:\n{text}\nSummary:"], sampling, use_tqdm=False)
        return output.outputs[0]


def main():
    summarize = Summarizer("./press")
    articles = ["The mayor opened a bridge. " * n for n in (3, 60, 200)]
    for article in articles:
        print("article of", len(article), "characters:", len(summarize(article).token_ids), "tokens")
    config = summarize.llm.llm_engine.vllm_config
    print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
