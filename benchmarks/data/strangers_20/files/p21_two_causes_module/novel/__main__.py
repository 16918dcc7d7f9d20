import argparse

from .engine import build


def main():
    parser = argparse.ArgumentParser(prog="novel")
    parser.add_argument("--chapters", type=int, default=1)
    chapters = parser.parse_args().chapters
    from vllm import SamplingParams

    llm = build()
    out = llm.generate(["once upon a time"] * chapters, SamplingParams(max_tokens=3, ignore_eos=True))
    print("BLIND20-DONE", [len(o.outputs[0].token_ids) for o in out], flush=True)


if __name__ == "__main__":
    main()
