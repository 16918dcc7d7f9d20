"""Granite hybrid (Mamba-2 and attention) over long transcripts."""
from vllm import LLM, SamplingParams

import oomguard


def build(max_model_len=100_000, kv_mib=12):
    return LLM(
        model="./granite-h",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=max_model_len,
        max_num_seqs=4,
        mamba_ssm_cache_dtype="float32",
        enable_prefix_caching=False,
        kv_cache_memory_bytes=kv_mib * 2**20,
    )


guarded_build = oomguard.guard(allow="reduces-capacity")(build)


def main():
    llm = guarded_build()
    outputs = llm.generate(["Speaker 1: welcome.", "Speaker 2: thanks."], SamplingParams(max_tokens=6, ignore_eos=True))
    print([len(o.outputs[0].token_ids) for o in outputs])
    config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE block_size", config.cache_config.block_size)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
