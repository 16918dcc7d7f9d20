"""Seed 004 on the real vLLM: a job that runs alone does not start with a draft model; which of the
advice helps.

    python examples/seed_speculative.py

The job reads its own YAML, as the seed has it. The KV cache of target and draft shares what the
utilization leaves of this machine's memory: 1.00 GiB for 32768 tokens alone, 1.50 GiB with the
draft.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from seed_run import (
    GIB,
    JOBS,
    VERSION,
    Ran,
    conclude,
    make_model,
    node_bytes,
    run,
    show,
    size,
    table,
)

import oomguard

LENGTH = 32768
SHORT = 8192
DRAFTED = 5
FEWER = 3
# What the utilization asks for: the worker and 1.25 GiB, between what the job needs alone and with
# the draft.
ASKED_BYTES = round(1.95 * GIB)
# The seed's own step: 0.75 for 0.9.
LOWER = 0.75 / 0.9
_HAS = re.compile(r"Auto set \(([\d.]+)/[\d.]+\) GiB for KV cache")


def config(utilization: float, length: int, drafted: int | None) -> str:
    """The job's file, as the seed's guide writes it."""
    engine = f"engine:\n  gpu_memory_utilization: {utilization}\n  max_model_len: {length}\n"
    if drafted is None:
        return engine
    return f"{engine}speculative_decoding:\n  num_tokens: {drafted}\n"


def needed(folder: Path, drafted: int | None, length: int) -> int:
    """The KV cache of one request of full length, before anything is started."""
    draft = {"model": str(folder / "draft"), "num_speculative_tokens": drafted}
    planned = oomguard.plan(
        folder / "target",
        device="cpu",
        gpu_memory="16GiB",
        engine_version=VERSION,
        dtype="float32",
        max_model_len=length,
        speculative_config=draft if drafted else None,
    )
    return planned.budget.stages[0].needed_bytes


def main() -> None:
    utilization = round(ASKED_BYTES / node_bytes(), 3)
    lower = round(utilization * LOWER, 3)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model("drafted", folder)
        lengths = (LENGTH, SHORT)
        needs = {
            (n, length): needed(folder, n, length)
            for n in (None, FEWER, DRAFTED)
            for length in lengths
        }

        def start(drafted: int | None, ratio: float, length: int, guard: list[str] | None) -> Ran:
            (folder / "job.yaml").write_text(config(ratio, length, drafted))
            return run(["python", str(JOBS / "speculate.py"), "job.yaml"], folder, oomguard=guard)

        alone = start(None, utilization, LENGTH, None)
        advised = start(DRAFTED, lower, SHORT, None)
        guarded = start(DRAFTED, utilization, LENGTH, [])
    show(guarded)
    has = [pools(ran) for ran in (alone, advised, guarded)]
    solved = (guarded.result or {}).get("utilization", utilization)
    table(
        "A job with a draft model: what its KV cache needs and has",
        [
            ["", "utilization", "length", "drafted", "needs (planned)", "has", "outcome"],
            [
                "without a draft",
                utilization,
                LENGTH,
                "-",
                size(needs[None, LENGTH]),
                *has[0][:1],
                outcome(alone),
            ],
            [
                "with one, as the seed had it",
                utilization,
                LENGTH,
                DRAFTED,
                size(needs[DRAFTED, LENGTH]),
                *has[2][:1],
                "died",
            ],
            [
                "the seed's quick fix",
                lower,
                SHORT,
                DRAFTED,
                size(needs[DRAFTED, SHORT]),
                *has[1][:1],
                outcome(advised),
            ],
            [
                "with oomguard",
                solved,
                LENGTH,
                DRAFTED,
                size(needs[DRAFTED, LENGTH]),
                *has[2][-1:],
                outcome(guarded),
            ],
        ],
    )
    facts = guarded.incident.get("facts", {})
    table(
        "The seed's advice, and what was found",
        [
            ["what it says", "what was found"],
            [
                "a lower utilization leaves headroom",
                f"{lower} for {utilization}: the KV cache has {has[1][0]}, not {has[2][0]}",
            ],
            [
                "a shorter length needs less",
                f"it does: {SHORT} for {LENGTH} tokens, a quarter of what the job asked for",
            ],
            [
                "3 drafted tokens for 5",
                (
                    f"{size(needs[FEWER, LENGTH])} for {size(needs[DRAFTED, LENGTH])}: the KV cache "
                    "is the draft's, not its tokens'"
                ),
            ],
            [
                "32768 tokens take 5 to 6 GB",
                (
                    f"what the model makes them: {size(needs[None, LENGTH])} here, "
                    f"{size(needs[DRAFTED, LENGTH])} with the draft"
                ),
            ],
        ],
    )
    conclude(checks(alone, advised, guarded, needs[DRAFTED, LENGTH], facts))


def pools(ran: Ran) -> list[str]:
    """The KV cache of each start, as the engine printed it."""
    return [f"{gib} GiB" for gib in _HAS.findall(ran.out)] or ["?"]


def outcome(ran: Ran) -> str:
    if ran.result is None:
        return "died"
    if ran.result["drafted"]:
        drafted = f", {ran.result['accepted']} of {ran.result['drafted']} drafted tokens taken"
    else:
        drafted = ""
    return f"ran{drafted}"


def checks(alone: Ran, advised: Ran, guarded: Ran, needs: int, facts: dict) -> dict[str, bool]:
    tokens = [ran.result and ran.result["tokens"] for ran in (alone, advised, guarded)]
    lengths = [ran.result and ran.result["max_model_len"] for ran in (alone, advised, guarded)]
    printed = facts.get("kv_cache_needed_bytes", 0)
    return {
        "the job runs without a draft, and dies with one": alone.result is not None
        and len(guarded.attempts) > 1,
        "the need that was planned is the one that the engine prints, to its two digits": abs(
            needs - printed
        )
        < GIB / 100,
        "one relaunch, and the length is kept": len(guarded.attempts) == 2
        and lengths == [LENGTH, SHORT, LENGTH],
        "the file and the key to edit are told": "key=engine.gpu_memory_utilization"
        in guarded.errors,
        "the answers are those without a draft": tokens[0] is not None
        and tokens[0] == tokens[1] == tokens[2],
    }


if __name__ == "__main__":
    main()
