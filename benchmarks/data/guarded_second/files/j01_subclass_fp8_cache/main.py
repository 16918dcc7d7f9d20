from vllm import LLM, SamplingParams

import oomguard


class ReportLLM(LLM):
    """Our defaults, so that nobody has to remember them."""

    def __init__(self, model, *, window=50_000, **kwargs):
        kwargs.setdefault("dtype", "float16")
        kwargs.setdefault("load_format", "dummy")
        kwargs.setdefault("enforce_eager", True)
        kwargs.setdefault("kv_cache_dtype", "fp8")
        super().__init__(model, max_model_len=window, max_num_seqs=16, **kwargs)

    def report(self, text):
        (output,) = self.generate([text], SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
        return output.outputs[0].token_ids


def main():
    with oomguard.guard(allow="reduces-capacity"):

        class Desk:
            llm = ReportLLM("./desk-phi", kv_cache_memory_bytes=30_000_000)

    print("report", len(Desk.llm.report("Sales in May were")))
    config = Desk.llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE kv_cache_dtype", config.cache_config.cache_dtype)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
