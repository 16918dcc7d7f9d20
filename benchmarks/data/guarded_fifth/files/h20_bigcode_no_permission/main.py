import sys

from vllm import LLM, EngineArgs

import oomguard

# the length and the cache are the team's own; nothing may be reduced without a review
ARGS = EngineArgs(
    model="./completer",
    dtype="float16",
    load_format="dummy",
    enforce_eager=True,
    max_model_len=8192,
    max_num_seqs=8,
    kv_cache_memory_bytes=4_000_000,
)


def report(error, g):
    notes = "\n".join(getattr(error, "__notes__", []))
    print("attempts", len(g.attempts), "lines of notes", len(notes.splitlines()))
    assert "Engine core initialization failed" in str(error), error
    assert "oomguard" in notes and "max_model_len" in notes, notes
    print("VALUE max_model_len", ARGS.max_model_len)
    print("VALUE max_num_seqs", ARGS.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", ARGS.kv_cache_memory_bytes)


def main():
    with oomguard.guard() as g:
        try:
            llm = LLM.from_engine_args(ARGS)
        except RuntimeError as error:  # caught while the guard's block lasts
            report(error, g)
            return
    sys.exit(f"started with {llm.llm_engine.vllm_config.model_config.max_model_len}")


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
