"""The request loop of examples/llm_engine_example.py with our model."""
from vllm import EngineArgs, LLMEngine, SamplingParams

import oomguard


def build():
    args = EngineArgs(
        model="./olmo",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=32768,
        max_num_batched_tokens=32768,
        max_num_seqs=4,
        kv_cache_memory_bytes=100 * 1024**2,
    )
    with oomguard.guard():
        return LLMEngine.from_engine_args(args)


def main():
    engine = build()
    prompts = ["To be or not to be,", "It was the best of times"]
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=6, ignore_eos=True))
    finished = 0
    while engine.has_unfinished_requests():
        finished += sum(output.finished for output in engine.step())
    print("finished", finished)
    config = engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
