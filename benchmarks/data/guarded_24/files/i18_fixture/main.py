"""Smoke tests in the style of pytest, run without it: fixtures are generators, the yield stands inside the guard."""
import contextlib

from vllm import LLM, SamplingParams

import oomguard


@contextlib.contextmanager
def llm():
    with oomguard.guard():
        engine = LLM("./gpt2", dtype="float16", load_format="dummy", enforce_eager=True, max_num_seqs=2, kv_cache_memory_bytes=3 * 2**20)
        yield engine
    del engine


def test_length(llm):
    output = llm.generate("Hello, my name is", SamplingParams(max_tokens=7, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 7


def test_greedy_is_stable(llm):
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    first, second = (llm.generate("a b c", sampling)[0].outputs[0].token_ids for _ in range(2))
    assert list(first) == list(second)


def test_prefix_is_kept(llm):
    output = llm.generate("prefix", SamplingParams(max_tokens=1))[0]
    assert output.prompt == "prefix"


def main():
    with llm() as engine:
        for test in (test_length, test_greedy_is_stable, test_prefix_is_kept):
            test(engine)
            print("PASSED", test.__name__)
        print("VALUE max_model_len", engine.llm_engine.vllm_config.model_config.max_model_len)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
