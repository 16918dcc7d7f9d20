"""Seed 000 on the real vLLM: perplexity by sliding windows runs out of memory; which of the changes
makes the room.

    python examples/seed_scoring.py

The seed's "device" is here what a process may map (`ulimit -v`), its model one layer under the same
vocabulary of 128256. Its remedy, prefix caching off, is tried alone first, then by `oomguard run`,
which adds what makes room.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from seed_run import JOBS, MIB, VERSION, Ran, conclude, make_model, run, show, size, table

import oomguard

MODEL = "./scored"
STEP_TOKENS = 4096
WINDOW_TOKENS = 2048
# Of what scoring takes, the part that the limit leaves free.
ROOM_RATIO = 0.7


def predicted(folder: Path, step_tokens: int) -> int:
    """What scoring takes beside the engine, by vocabulary x tokens x bytes, before anything is
    started.
    """
    planned = oomguard.plan(
        folder / MODEL,
        device="cpu",
        gpu_memory="16GiB",
        engine_version=VERSION,
        dtype="float32",
        max_model_len=WINDOW_TOKENS + 1,
        max_num_batched_tokens=step_tokens,
        kv_cache_memory_bytes=64 * MIB,
        prompt_logprobs=True,
    )
    return planned.budget.prompt_logprobs_bytes


def main() -> None:
    script = str(JOBS / "score_windows.py")
    off = "--no-prefix-caching"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model("scored", folder)
        whole = predicted(folder, STEP_TOKENS)
        free = run(["python", script, MODEL], folder)
        if free.result is None:
            raise SystemExit(free.out[-2000:] + free.errors[-2000:])
        limit = free.result["address_space_bytes"] - round(
            (1 - ROOM_RATIO) * free.result["scoring_bytes"]
        )
        after = run(["python", script, MODEL, off], folder, limit_bytes=limit, oomguard=[])
        if after.attempts:
            settings = after.attempts[-1]["settings"]
        else:
            settings = {}
        step = settings.get("max_num_batched_tokens", STEP_TOKENS)
        part = predicted(folder, step)
    show(after)
    result = after.result or {}
    terms = str(after.incident.get("facts", {}).get("allocation_terms", "not named"))
    terms = terms[terms.find("(") + 1 :].rstrip(")")
    room = size(free.result["scoring_bytes"] * ROOM_RATIO)
    table(
        "Scoring windows of 2048 tokens: memory beside the standing engine",
        [
            [
                "",
                "prefix caching",
                "tokens a step",
                "KV blocks",
                "predicted",
                "measured",
                "outcome",
            ],
            ["no limit", "on", free.result["step_tokens"], *figures(free.result, whole)],
            [
                f"{room} left: the seed's fix",
                "off",
                STEP_TOKENS,
                "",
                size(whole),
                "",
                f"died: {terms}",
            ],
            ["the same, with oomguard", "off", step, *figures(result, part)],
        ],
    )
    hits = free.result["prefix_hits"]
    measured = size(result.get("scoring_bytes", 0))
    table(
        "The seed's account, and what was found",
        [
            ["what it says", "what was found"],
            [
                "the KV cache of all windows is kept",
                f"{free.result['blocks']} blocks with caching and without: the pool is made once",
            ],
            [
                "their prefixes are found again",
                (
                    f"{hits} tokens were: prompts whose log-probabilities are asked for are computed "
                    "anew"
                ),
            ],
            ["prefix caching off is the fix", "with it alone the job dies"],
            [
                "log-probabilities: 1 GB",
                f"{size(whole)} predicted, {size(free.result['scoring_bytes'])} measured",
            ],
            ["what made the room", f"{step} tokens a step for {STEP_TOKENS}: {measured} measured"],
        ],
    )
    conclude(checks(free.result, after, whole, step))


def figures(result: dict, expected: int) -> list[object]:
    if not result:
        return ["", size(expected), "", "died"]
    outcome = f"ran: perplexity {result['perplexity']:.8g}"
    return [result["blocks"], size(expected), size(result["scoring_bytes"]), outcome]


def checks(free: dict, after: Ran, whole: int, step: int) -> dict[str, bool]:
    result = after.result or {"perplexity": 0.0, "blocks": 0}
    causes = [cause["id"] for cause in after.incident.get("causes", ())]
    difference = abs(result["perplexity"] / free["perplexity"] - 1)
    return {
        "it fails of memory, and the cause is prompt_logprobs": causes[:1] == ["prompt_logprobs"],
        "prefix caching off alone does not run": bool(after.attempts)
        and after.attempts[0]["kind"] == "host_oom",
        "one relaunch, in steps shorter than a window": len(after.attempts) == 2
        and step < WINDOW_TOKENS,
        "the prediction is within 5 % of what was measured": abs(whole / free["scoring_bytes"] - 1)
        <= 0.05,
        "the KV cache has as many blocks with prefix caching as without": free["blocks"]
        == result["blocks"],
        f"the perplexity is that of the run that fits, to {difference:.0e} of it": difference
        <= 1e-6,
    }


if __name__ == "__main__":
    main()
