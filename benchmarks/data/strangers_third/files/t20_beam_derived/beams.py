"""Beam search with the settings of engine.json."""
import argparse
import json


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--width", type=int, default=4)
    p.add_argument("--engine", default="engine.json")
    a = p.parse_args()
    from vllm import LLM
    from vllm.sampling_params import BeamSearchParams
    with open(a.engine) as f:
        llm = LLM(**json.load(f))
    out = llm.beam_search([{"prompt_token_ids": [1] + [20 + i] * 100} for i in range(2)],
                          BeamSearchParams(beam_width=a.width, max_tokens=8))
    for o in out:
        print("beams", len(o.sequences))
    print("BLIND3-DONE")


if __name__ == "__main__":
    main()
