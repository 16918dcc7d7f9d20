from vllm import LLM, SamplingParams

import oomguard


class Recurrent(LLM):
    """Holds one state a sequence, however long it is."""

    CACHE = 1_500_000

    def __init__(self, model, **kwargs):
        super().__init__(
            model, dtype="float16", load_format="dummy", enforce_eager=True, kv_cache_memory_bytes=self.CACHE, **kwargs
        )


def attempt(function, *args, **kwargs):
    try:
        return function(*args, **kwargs), None
    except RuntimeError as error:
        return None, error


@oomguard.guard(allow="reduces-capacity", pin=("num_gpu_blocks_override",))
def start(**kwargs):
    return Recurrent("./stream", **kwargs)


def main():
    limits = {"max_model_len": 4096, "max_num_seqs": 2}
    llm, error = attempt(start, **limits)
    if llm is not None:
        raise SystemExit(len(llm.generate(["hello"], SamplingParams(max_tokens=2))))
    notes = getattr(error, "__notes__", [])
    print(type(error).__qualname__, str(error)[:80], len(notes))
    assert type(error) is RuntimeError and "Engine core initialization failed" in str(error)
    assert any("oomguard" in note for note in notes)
    for name, value in limits.items():
        print("VALUE", name, value)
    print("VALUE kv_cache_memory_bytes", Recurrent.CACHE)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
