from vllm import EngineArgs, LLMEngine

import oomguard

WISHES = {"max_model_len": 24_576, "max_num_seqs": 6, "kv_cache_memory_bytes": 9_000_000}
LEAST = 6144  # below this the contracts do not fit, and the service is of no use


def main():
    args = EngineArgs(model="./contracts", dtype="float16", load_format="dummy", enforce_eager=True, **WISHES)
    try:
        with oomguard.guard(allow="reduces-capacity", floors={"max_model_len": LEAST}):
            engine = LLMEngine.from_engine_args(args)
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        print("FAILED", type(error).__module__, type(error).__name__, "notes:", len(notes))
        assert type(error) is RuntimeError, type(error)
        assert "Engine core initialization failed" in str(error)
        assert any("oomguard" in note for note in notes), notes
    else:
        raise SystemExit(f"started with {engine.vllm_config.model_config.max_model_len}")
    assert args.max_model_len == WISHES["max_model_len"]
    for name in WISHES:
        print("VALUE", name, getattr(args, name))


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
