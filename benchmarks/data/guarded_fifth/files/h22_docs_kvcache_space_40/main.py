import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "40")  # copied from the CPU page of vLLM's documentation

from vllm import LLM, SamplingParams  # noqa: E402

import oomguard  # noqa: E402


def main():
    try:
        with oomguard.guard(allow="reduces-capacity"):
            llm = LLM("./ernie", max_model_len=8192, max_num_seqs=8, dtype="float16", load_format="dummy", enforce_eager=True)
    except RuntimeError as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        print("lines of notes", len(notes.splitlines()))
        assert "Engine core initialization failed" in str(error), error
        assert "oomguard" in notes, notes
    else:
        llm.generate(["hello"], SamplingParams(max_tokens=2))
        raise SystemExit("40 GiB of cache were there")
    print("VALUE VLLM_CPU_KVCACHE_SPACE", os.environ["VLLM_CPU_KVCACHE_SPACE"])
    print("VALUE max_model_len", 8192)
    print("VALUE max_num_seqs", 8)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
