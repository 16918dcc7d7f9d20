from vllm import LLM
from vllm.sampling_params import BeamSearchParams


class Translator(LLM):
    """An LLM with our settings."""

    def __init__(self, path="./model", **kwargs):
        kwargs.setdefault("max_model_len", 1024)
        super().__init__(model=path, dtype="float16", load_format="dummy", enforce_eager=True, kv_cache_memory_bytes=32 << 20, max_logprobs=20, **kwargs)

    def translate(self, texts):
        params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
        return [out.sequences[0].tokens for out in self.beam_search([{"prompt": t} for t in texts], params)]


if __name__ == "__main__":
    beams = Translator(max_num_seqs=16).translate(["guten Tag", "auf Wiedersehen"])
    print("HEALTHY50-DONE", [len(b) for b in beams], flush=True)
