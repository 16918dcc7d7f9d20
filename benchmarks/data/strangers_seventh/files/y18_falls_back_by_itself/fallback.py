"""Takes the longest context that starts; what failed before is not news."""
import gc

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

LADDER = (16384, 4096)


def start():
    for length in LADDER:
        try:
            return LLM("./starcoder", max_model_len=length, max_num_seqs=8, kv_cache_memory_bytes=16_000_000,
                       dtype="float16", load_format="dummy", enforce_eager=True)
        except (RuntimeError, ValueError) as error:
            print(f"{length} tokens do not start here ({type(error).__name__}), going down", flush=True)
            gc.collect()
    raise SystemExit("no length starts")


def main():
    llm = start()
    outs = llm.generate([TokensPrompt(prompt_token_ids=[9] * 100)] * 2, SamplingParams(max_tokens=8, ignore_eos=True))
    print("STARTED", llm.llm_engine.vllm_config.model_config.max_model_len, [len(o.outputs[0].token_ids) for o in outs],
          flush=True)


if __name__ == "__main__":
    main()
