"""What a test framework does with generator fixtures, without the framework."""
import contextlib
import inspect

from vllm import LLM, SamplingParams

import oomguard


def folder():
    yield "./judge"


def engine(folder):
    with oomguard.guard(max_attempts=4) as g:
        llm = LLM(
            folder,
            gpu_memory_utilization=0.01,
            max_model_len=4096,
            max_num_seqs=8,
            max_num_batched_tokens=1024,
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
        )
    yield llm
    print("attempts", len(g.attempts))


def test_lengths(engine):
    outputs = engine.generate(["good", "bad"], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [4, 4]


def test_values(engine):
    config = engine.llm_engine.vllm_config
    print("VALUE gpu_memory_utilization", config.cache_config.gpu_memory_utilization)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)


def resolve(function, fixtures, made, stack):
    values = []
    for name in inspect.signature(function).parameters:
        if name not in made:
            generator = resolve(fixtures[name], fixtures, made, stack)
            made[name] = next(generator)
            stack.callback(next, generator, None)
        values.append(made[name])
    return function(*values)


def main():
    fixtures, made = {"folder": folder, "engine": engine}, {}
    with contextlib.ExitStack() as stack:
        for test in (test_lengths, test_values):
            resolve(test, fixtures, made, stack)
            print("PASSED", test.__name__)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
