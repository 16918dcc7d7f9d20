import sys

import yaml


def main(path):
    with open(path) as f:
        conf = yaml.safe_load(f)
    from vllm import LLM

    llm = LLM(**conf["llm"])
    scores = [out.outputs.score for out in llm.score(conf["query"], conf["documents"])]
    print("HEALTHY50-DONE", len(scores), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
