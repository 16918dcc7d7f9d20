from vllm import LLM, SamplingParams


class Bot:
    def __init__(self):
        self.llm = LLM(model="./model", max_model_len=32768, kv_cache_memory_bytes=16 * 1024**2, dtype="float16", load_format="dummy", enforce_eager=True)

    def say(self, text):
        return self.llm.generate([text], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0]


if __name__ == "__main__":
    print("BLIND40-DONE", len(Bot().say("hi").token_ids), flush=True)
