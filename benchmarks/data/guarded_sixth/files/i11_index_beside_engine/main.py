import numpy as np
from vllm import LLM, SamplingParams

import oomguard


class Index:
    """Vectors of all passages, in memory: it was there before the language model."""

    def __init__(self, gib):
        self.rows = np.ones((gib * 2**18, 1024), dtype=np.float32)

    def nearest(self, seed, count):
        rng = np.random.default_rng(seed)
        sample = rng.choice(len(self.rows), 64, replace=False)
        scores = self.rows[sample] @ rng.random(1024, dtype=np.float32)
        return [int(sample[n]) for n in np.argsort(scores)[:count]]


def main():
    index = Index(gib=5)
    with oomguard.guard():
        llm = LLM(
            "./answerer",
            dtype="float32",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=4096,
            num_gpu_blocks_override=160,
            max_num_batched_tokens=1024,
        )
    questions = ["who", "when was it", "how much did it cost"]
    prompts = [(
        f"passages {index.nearest(n, 3)}; question: "
        f"{text}"
    ) for n, text in enumerate(questions)]
    sampling = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert all(len(output.outputs[0].token_ids) == 5 for output in outputs)
    assert len(index.rows) == 5 * 2**18
    config = llm.llm_engine.vllm_config
    print("VALUE gpu_memory_utilization", config.cache_config.gpu_memory_utilization)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
