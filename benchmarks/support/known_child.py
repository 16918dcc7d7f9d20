"""Run in the vLLM environment by death_known.py: guarded engines whose core is killed while a batch waits, and is not made again."""

import json
import os
import random
import signal
import sys
import threading
import time

import psutil
from vllm import LLM, SamplingParams

import oomguard

PROMPTS = 200


def core() -> psutil.Process:
    return next(c for c in psutil.Process().children() if "tracker" not in " ".join(c.cmdline()))


def main(model: str, rounds: int, seed: int) -> None:
    moments, killed = random.Random(seed), [0.0]
    params = SamplingParams(max_tokens=256, temperature=0, ignore_eos=True)

    def kill() -> None:
        os.kill(core().pid, signal.SIGKILL)
        killed[0] = time.monotonic()

    for _ in range(rounds):
        with oomguard.guard():
            llm = LLM(model, dtype="float32", max_model_len=512, kv_cache_memory_bytes=32 * 2**20, enforce_eager=True)
        threading.Timer(moments.uniform(0.3, 2), kill).start()
        try:
            llm.generate(["the quick brown fox"] * PROMPTS, params, use_tqdm=False)
        except Exception as error:  # noqa: BLE001 - which one it is is what is looked at
            print(
                "ROW",
                json.dumps({"raised": type(error).__name__, "seconds": round(time.monotonic() - killed[0], 2)}),
                flush=True,
            )
        else:
            print("ROW", json.dumps({"raised": None, "seconds": None}), flush=True)
        del llm


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
