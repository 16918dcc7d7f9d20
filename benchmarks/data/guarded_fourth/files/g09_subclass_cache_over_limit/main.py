import contextlib
import resource

from vllm import LLM, SamplingParams

import oomguard


@contextlib.contextmanager
def private_memory(gib):
    """What the queue of the department grants to one job."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (gib << 30, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class QuietLLM(LLM):
    """An LLM without a progress bar that counts what it wrote."""

    def __init__(self, model, *, cache_gb, context, **kwargs):
        self.written = 0
        super().__init__(model, kv_cache_memory_bytes=int(cache_gb * 1e9), max_model_len=context, **kwargs)

    def generate(self, prompts, sampling_params=None, **kwargs):
        outputs = super().generate(prompts, sampling_params, use_tqdm=False, **kwargs)
        self.written += sum(len(output.outputs[0].token_ids) for output in outputs)
        return outputs


def main():
    with private_memory(gib=4), oomguard.guard(allow="reduces-capacity"):
        llm = QuietLLM(
            "./archivist",
            cache_gb=6,
            context=8192,
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
        )
    llm.generate(["one", "two"], SamplingParams(max_tokens=6, ignore_eos=True))
    llm.generate(["three"], SamplingParams(max_tokens=6, ignore_eos=True))
    print("written", llm.written)
    config = llm.llm_engine.vllm_config
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
