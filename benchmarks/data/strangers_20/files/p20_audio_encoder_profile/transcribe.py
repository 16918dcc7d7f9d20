import json
import sys

from vllm import LLM


def run(path):
    job = json.load(open(path))
    config = job["engine"]
    engine = LLM(**config)
    print("BLIND20-DONE", job["name"], engine.llm_engine.model_config.max_model_len, flush=True)


if __name__ == "__main__":
    run(sys.argv[1])
