import json
import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    job = json.load(open(sys.argv[1]))
    llm = LLM(job["model"], **job["engine"])
    prompt = {"prompt_token_ids": [10 + i % 200 for i in range(job["document_tokens"])]}
    out = llm.generate([prompt], SamplingParams(max_tokens=job["max_tokens"], ignore_eos=True))
    print("BLIND40-DONE", len(out[0].outputs[0].token_ids), flush=True)
