import sys

from vllm import LLM, EngineArgs, SamplingParams

import oomguard

OWN = EngineArgs(
    model="./forecaster",
    dtype="float16",
    load_format="dummy",
    enforce_eager=True,
    max_model_len=20_000,
    max_num_seqs=3,
    max_num_batched_tokens=2048,
    kv_cache_memory_bytes=18_000_000,
)


def primary():
    """All numbers are ours, and nothing was permitted: then rather nothing than
    something shorter.
    """
    with oomguard.guard():
        return LLM.from_engine_args(OWN)


def fallback(texts):
    return [f"[no model] {text}" for text in texts]


def main():
    texts = ["rain?", "wind?"]
    try:
        llm = primary()
    except BaseException as error:
        if type(error) is not RuntimeError or "Engine core initialization failed" not in str(error):
            raise
        if not any("oomguard" in note for note in getattr(error, "__notes__", ())):
            raise
        answers = fallback(texts)
    else:
        outputs = llm.generate(texts, SamplingParams(max_tokens=2), use_tqdm=False)
        sys.exit(f"a model answered: {len(outputs)}, "
                 f"{llm.llm_engine.vllm_config.model_config.max_model_len}")
    assert answers == ["[no model] rain?", "[no model] wind?"]
    print("VALUE max_model_len", OWN.max_model_len)
    print("VALUE max_num_seqs", OWN.max_num_seqs)
    print("VALUE max_num_batched_tokens", OWN.max_num_batched_tokens)
    print("VALUE kv_cache_memory_bytes", OWN.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
