"""A small multiple-choice evaluation: the letter with the highest log-probability wins."""

import argparse
import json
import math
from pathlib import Path

from vllm import LLM, SamplingParams

import oomguard

LETTERS = "ABCD"


def load(path, limit=None):
    rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    return rows[:limit]


def prompt(row):
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"]))
    return f"{row['question']}\n{choices}\nAnswer:"


def evaluate(llm, rows):
    tokenizer = llm.get_tokenizer()
    letters = {letter: tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in LETTERS}
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
    correct = 0
    for row, output in zip(rows, llm.generate([prompt(row) for row in rows], sampling)):
        top = output.outputs[0].logprobs[0]
        scores = {c: top[t].logprob if t in top else -math.inf for c, t in letters.items()}
        best = max(scores, key=scores.get)
        correct += best == row["answer"]
    return correct / len(rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="./candidate")
    parser.add_argument("--tasks", nargs="*", default=["science.jsonl", "history.jsonl"])
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--kv-cache-bytes", type=int, default=20_000_000)
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()

    # the longest question of the tasks with its shots is below 2,048 tokens
    with oomguard.guard(allow="reduces-capacity", floors={"max_model_len": 2048}):
        llm = LLM(
            model=args.model,
            max_model_len=args.max_model_len,
            kv_cache_memory_bytes=args.kv_cache_bytes,
            max_num_seqs=32,
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
        )

    for task in args.tasks:
        print(f"{task}: {evaluate(llm, load(task, args.limit)):.3f}")

    config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
