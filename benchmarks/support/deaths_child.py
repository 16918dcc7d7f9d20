"""Run in the vLLM environment by engine_deaths.py: one guarded engine, whose core dies in the middle of batches of 500 prompts."""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
from vllm import LLM, SamplingParams

import oomguard

PROMPTS, MOST_TOKENS, ROWS = 500, 64, 16


def batch() -> list[str]:
    return [f"prompt number {number} " * (1 + number % 4) for number in range(PROMPTS)]


def core() -> psutil.Process:
    return next(c for c in psutil.Process().children() if "tracker" not in " ".join(c.cmdline()))


def generate(llm: LLM, order: list[int]) -> dict[int, list[int]]:
    """Return the tokens of each prompt, asked in an order; a prompt that is answered twice or not at all raises."""
    prompts = batch()
    params = SamplingParams(max_tokens=MOST_TOKENS, temperature=0, ignore_eos=True)
    outputs = llm.generate([prompts[number] for number in order], params, use_tqdm=False)
    assert [output.prompt for output in outputs] == [prompts[number] for number in order]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    return {number: list(output.outputs[0].token_ids) for number, output in zip(order, outputs, strict=True)}


def computed() -> int:
    """The tokens that all engines have computed so far, by their workers' own count."""
    return sum(map(int, Path(os.environ["DYING_COUNTS"]).read_text().split()))


def kill_at(tokens: float) -> None:
    """Kill the core once its workers have computed so many."""
    while computed() < tokens:
        time.sleep(0.02)
    os.kill(core().pid, signal.SIGKILL)


def main(model: str, kills: int, failures: int, seed: int) -> None:
    moments = random.Random(seed)
    with oomguard.guard(restart=True) as guard:
        llm = LLM(
            model,
            dtype="float32",
            max_model_len=512,
            kv_cache_memory_bytes=32 * 2**20,
            enforce_eager=True,
            max_num_seqs=ROWS,
            enable_prefix_caching=False,
        )
    before = computed()
    calm = generate(llm, list(range(PROMPTS)))
    tokens = computed() - before
    shuffled = list(range(PROMPTS))
    moments.shuffle(shuffled)
    other = generate(llm, shuffled)
    steps = PROMPTS * MOST_TOKENS // ROWS
    rows = []
    for number in range(kills + failures):
        kind = "kill" if number < kills else "failure"
        deaths = sum(attempt.error == "EngineDeadError" for attempt in guard.attempts)
        before = computed()
        if kind == "kill":
            at = (
                before + moments.uniform(0.05, 0.9) * tokens
            )  # by what is computed: a batch takes longer on a busy machine
            threading.Thread(target=kill_at, args=(at,), daemon=True).start()
        else:
            Path(os.environ["DYING_AFTER"]).write_text(f"{moments.randrange(steps // 20, steps * 9 // 10)}\n")
        began = time.monotonic()
        found = generate(llm, list(range(PROMPTS)))
        rows.append(
            {
                "kind": kind,
                "deaths": sum(attempt.error == "EngineDeadError" for attempt in guard.attempts) - deaths,
                "differing": sum(found[n] != calm[n] for n in range(PROMPTS)),
                "more_tokens": computed() - before - tokens,
                "seconds": round(time.monotonic() - began, 1),
            }
        )
        print("ROW", json.dumps(rows[-1]), flush=True)
    told = {"differing_undisturbed": sum(other[n] != calm[n] for n in range(PROMPTS)), "tokens": tokens}
    changed = sorted({f"{p.setting} {p.old} -> {p.new}" for a in guard.attempts for p in a.patches})
    print("RESULT", json.dumps(told | {"changed": changed}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
