import argparse
import json

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=argparse.FileType(), required=True)
    parser.add_argument("--limit", type=int, default=100)
    args = parser.parse_args()
    job = json.load(args.job)
    llm = LLM(job["model"], **job["engine"])
    choice = SamplingParams(max_tokens=12, structured_outputs=StructuredOutputsParams(choice=["positive", "negative"]))
    number = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"))
    prompts = job["prompts"][: args.limit]
    texts = [o.outputs[0].text for o in llm.generate(prompts * 2, [choice] * len(prompts) + [number] * len(prompts))]
    assert all(t in ("positive", "negative") for t in texts[: len(prompts)]), texts
    print("HEALTHY50-DONE", texts, flush=True)


if __name__ == "__main__":
    main()
