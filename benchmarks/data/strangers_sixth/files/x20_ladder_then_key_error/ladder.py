"""Start with the longest context that works."""
import json

from vllm import LLM, SamplingParams


def start():
    for length in (65536, 8192):
        try:
            return LLM(model="./arcee", dtype="float16", load_format="dummy", enforce_eager=True,
                       max_model_len=length, max_num_seqs=8, kv_cache_memory_bytes=64 * 1024**2)
        except Exception as error:
            print(f"{length} does not work: {error}", flush=True)
    raise SystemExit("no length works")


def main():
    llm = start()
    with open("prompts.json") as f:
        prompts = [p["text"] for p in json.load(f)]
    outs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    print("LADDER", [len(o.outputs[0].token_ids) for o in outs], flush=True)


if __name__ == "__main__":
    main()
