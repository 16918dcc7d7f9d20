import logging

from vllm import LLM

import oomguard

SETTINGS = {"max_model_len": 32768, "max_num_seqs": 10, "kv_cache_memory_bytes": 6_000_000}

logging.basicConfig(level=logging.INFO)


def strict(folder):
    """The team's rule for this model: no change that a user could notice."""
    with oomguard.guard() as inner:
        try:
            return LLM(folder, dtype="float16", load_format="dummy", enforce_eager=True, **SETTINGS)
        finally:
            print("inner attempts", len(inner.attempts))


def main():
    with oomguard.guard(allow="reduces-capacity") as outer:
        try:
            llm = strict("./notary")
        except RuntimeError as error:
            print("outer attempts", len(outer.attempts))
            print("notes", len(getattr(error, "__notes__", [])) > 0)
            print("engine's own", "Engine core initialization failed" in str(error))
            for name, value in SETTINGS.items():
                print("VALUE", name, value)
            print("UNFIXED", type(error).__name__)
            raise
    config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
