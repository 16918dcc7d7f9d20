import itertools

from vllm import LLM, SamplingParams

import oomguard


def lines():
    for number in itertools.count():
        yield f"line {number}: " + "and so on " * (number % 4)


@oomguard.guard(allow="reduces-capacity")
def annotated(source, size, **engine):
    """Yields (text, tokens) of an endless source; the engine lives as long as the generator."""
    llm = LLM("./scribe", dtype="float16", load_format="dummy", enforce_eager=True, **engine)
    config = llm.llm_engine.vllm_config
    yield {
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
        "block_size": config.cache_config.block_size,
    }
    sampling = SamplingParams(max_tokens=7, ignore_eos=True, top_k=20)
    while chunk := list(itertools.islice(source, size)):
        for output in llm.generate(chunk, sampling, use_tqdm=False):
            yield output.prompt, len(output.outputs[0].token_ids)


def main():
    stream = annotated(lines(), 5, max_model_len=16_384, max_num_seqs=10, block_size=64, kv_cache_memory_bytes=24_000_000)
    values = next(stream)
    rows = list(itertools.islice(stream, 12))
    stream.close()
    assert [text for text, _ in rows] == list(itertools.islice(lines(), 12))
    assert {tokens for _, tokens in rows} == {7}, rows
    for name, value in values.items():
        print("VALUE", name, value)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
