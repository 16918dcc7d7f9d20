from contextlib import ExitStack

from vllm import LLM, SamplingParams

import oomguard

SHARED = {"dtype": "float16", "load_format": "dummy", "enforce_eager": True, "max_num_seqs": 8}
ROLES = {
    "triage": {"max_model_len": 2048, "kv_cache_memory_bytes": 6_000_000},
    # same model, whole files
    "archive": {"max_model_len": 30_000, "kv_cache_memory_bytes": 14_000_000},
}


def value_lines(llm):
    config = llm.llm_engine.vllm_config
    return {
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
    }


def main():
    with ExitStack() as stack:
        stack.enter_context(oomguard.guard(allow="reduces-capacity"))
        engines = {role: LLM("./registrar", **SHARED, **own) for role, own in ROLES.items()}
    assert value_lines(engines["triage"]) == {"max_num_seqs": 8, **ROLES["triage"]}
    letters = [f"letter {n}" for n in range(7)]
    kinds = engines["triage"].generate(letters, SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    assert [kind.prompt for kind in kinds] == letters
    odd = [kind.prompt for kind in kinds if kind.outputs[0].token_ids[0] % 2]
    chosen = odd or letters[:2]
    files = engines["archive"].generate(
        [text + " page" * 500 for text in chosen], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False
    )
    assert [len(f.outputs[0].token_ids) for f in files] == [6] * len(chosen)
    assert all(f.prompt.startswith(text) for f, text in zip(files, chosen, strict=True))
    for name, value in value_lines(engines["archive"]).items():
        print("VALUE", name, value)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
