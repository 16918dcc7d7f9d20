from vllm import LLM, SamplingParams

import oomguard


def fixture(function):
    function.is_fixture = True
    return function


@fixture
def llm():
    with oomguard.guard(allow="reduces-capacity"):
        engine = LLM(
            model="./neox",
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=16384,
            kv_cache_memory_bytes=64 * 1024**3,
            num_gpu_blocks_override=400,
            max_num_seqs=20,
        )
    yield engine
    del engine


def test_lengths(llm):
    outputs = llm.generate(["one", "two", "three"], SamplingParams(max_tokens=7, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [7, 7, 7]
    config = llm.llm_engine.vllm_config
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
