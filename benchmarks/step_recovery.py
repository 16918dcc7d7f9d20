"""Figure: a vLLM engine whose steps run out of memory at random moments, under eight clients: is it
alive, did every other request finish with the same tokens, what did it cost.

The real engine runs on the CPU, in each mode that the page of the docs names (support/step_engine.py
raises the failures). Then the memory after many recoveries, the throughput with the recovery in
place and without, in turns, and the relaunches of `oomguard run` with and without the recovery.
BENCH_RESUME=FOLDER keeps the modes that are done.
"""

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from oomguard.journal.store import Journal
from support.figure import conclude, skip
from support.resume import Results
from support.stranger_case import read_cases
from support.stranger_run import observe

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".venv-vllm"
ENGINE = ROOT / "benchmarks" / "support" / "step_engine.py"
LIMIT_S = 1500
# Triton's interpreter is a hundred times slower than the first runner: fewer and shorter requests.
SECOND_RUNNER = {"runner": 2, "requests": 10, "tokens": 8, "lengths": [20, 60], "rate": 0.04}
MODES: dict[str, dict[str, Any]] = {
    "first runner": {"failures": 35},
    "asynchronous": {"failures": 30, "async": 1},
    "no prefix caching": {"failures": 25, "arguments": {"enable_prefix_caching": False}},
    "no chunked prefill": {"failures": 25, "arguments": {"enable_chunked_prefill": False}},
    "structured output": {"failures": 20, "structured": 1},
    "structured, asynchronous": {"failures": 20, "structured": 1, "async": 1},
    # Short prompts: vLLM's CPU backend cannot compute a seeded one in several steps.
    "seeded draws": {"failures": 20, "seeded": 1, "async": 1, "lengths": [20, 60, 200]},
    "LoRA": {"failures": 15, "lora": 1, "requests": 20},
    "second runner": {"failures": 15, **SECOND_RUNNER},
    "second runner, asynchronous": {"failures": 15, "async": 1, **SECOND_RUNNER},
}
# What fails in a user's program under `oomguard run`, on the tiny model (step_engine.py)
FAULTS = ("passing", "large step", "large batch", "one request", "gone")
# Testers' programs whose engine starts well and runs out of memory at work, with real limits.
AT_WORK = ("aa08_rollouts_sixteen_a_prompt_top_p", "aa17_bench_latency_wide_mlp_step")
LEAK = {"way": "leak", "failures": 1000, "lengths": [20, 60], "tokens": 8}
COST = {"way": "cost", "turns": 240, "lengths": [20, 200], "tokens": 32}
COST_GOAL_RATIO = 0.995
PAUSE_GOAL_MS = 20.0
WORST_GOAL_MS = 1000.0
# The first tenth compiles the CPU kernels of most shapes; a leak of one step's tensors is a hundred
# times as much.
RSS_GOAL_BYTES = 32 << 20


def run(folder: Path, mode: dict[str, Any]) -> dict[str, Any] | None:
    """Run one engine; None if it ended without a result."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OOMGUARD_")}
    env |= {"HF_HUB_OFFLINE": "1", "PATH": f"{ENVIRONMENT / 'bin'}{os.pathsep}{env['PATH']}"}
    ran = subprocess.run(
        ["python", str(ENGINE), json.dumps(mode)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(ran.stderr[-2000:])
        return None
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--resume", type=Path, help="file that keeps the modes that are done")
    parser.add_argument("--only", nargs="*", help="only these modes, leak, cost or relaunches")
    asked = parser.parse_args()
    if not (ENVIRONMENT / "ready").exists():
        skip("no vLLM environment: run scripts/vllm-env")
    work = {**MODES, "leak": LEAK, "cost": COST}
    results = Results(asked.resume)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make = [str(ENVIRONMENT / "bin" / "python"), str(ROOT / "examples" / "make_tiny_model.py")]
        subprocess.run([*make, "tiny"], cwd=folder, check=True, capture_output=True)
        found = {}
        for mode, values in work.items():
            if asked.only and mode not in asked.only:
                continue
            found[mode] = results.kept(mode, functools.partial(run, folder, values))
            print(shown(mode, found[mode]), flush=True)
        relaunches = {}
        if not asked.only or "relaunches" in asked.only:
            relaunches = count_relaunches(results)
    is_met = [
        report(found),
        report_leak(found.get("leak")),
        report_cost(found.get("cost")),
        report_relaunches(relaunches),
    ]
    conclude("step recovery", met=all(is_met))


def count_relaunches(results: Results) -> dict[str, dict[str, Any]]:
    """Run programs that run out of memory at work, with the recovery and without."""
    testers = {case["name"]: case for case in read_cases("strangers_ninth")}
    found: dict[str, dict[str, Any]] = {}
    for case in (*FAULTS, *AT_WORK):
        for options in ([], ["--no-step-recovery"]):
            name = " ".join(("relaunches", case, *options))
            if case in FAULTS:
                run_case = functools.partial(run_job, case, options)
            else:
                tester = testers[case]
                allowed = [*tester["allow"], *options]
                # The tester's limit is for an idle machine.
                changed = {**tester, "allow": allowed, "timeout": LIMIT_S}
                run_case = functools.partial(observe, changed)
            seen = results.kept(name, run_case)
            found[name] = seen
            print(f"{name}: {seen['relaunches']} relaunches, runs: {seen['runs']}", flush=True)
    return found


def run_job(fault: str, options: list[str]) -> dict[str, Any]:
    """Run a user's program with a fault under `oomguard run`; return its end and its relaunches."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = str(ENVIRONMENT / "bin" / "python")
        make = [python, str(ROOT / "examples" / "make_tiny_model.py"), "tiny"]
        subprocess.run(make, cwd=folder, check=True, capture_output=True)
        job = [python, str(ENGINE), json.dumps({"way": "job", "fault": fault})]
        allowed = ["--allow", "reduces-capacity", "--journal", "journal.sqlite3"]
        command = [str(ENVIRONMENT / "bin" / "oomguard"), "run", *allowed, *options, "--", *job]
        env = {key: value for key, value in os.environ.items() if not key.startswith("OOMGUARD_")}
        ran = subprocess.run(
            command,
            cwd=folder,
            env={**env, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        records = Journal(folder / "journal.sqlite3").records()
    return {
        "runs": ran.returncode == 0 and "RESULT" in ran.stdout,
        "relaunches": max(0, len(records) - 1),
        "attempts": [dict(record.settings) for record in records],
        "result": [line for line in ran.stdout.splitlines() if line.startswith("RESULT")],
    }


def report_relaunches(found: dict[str, dict[str, Any]]) -> bool:
    """Print how many relaunches the recovery saves.

    An engine that ends costs a relaunch, or ends its program if no change is certain enough.
    """
    if not found:
        return True
    counts = {}
    for options in ("with", "without"):
        seen = []
        for name, one in found.items():
            if name.endswith("--no-step-recovery") == (options == "without"):
                seen.append(one)
        relaunches = sum(one["relaunches"] for one in seen)
        lost = sum(not one["runs"] for one in seen)
        counts[options] = relaunches + lost
        print(
            f"{len(seen)} programs that run out of memory at work, {options} the recovery: "
            f"{relaunches} relaunches, {lost} programs lost"
        )
    print(f"engines that ended: {counts['with']} and {counts['without']} (goal: fewer than half)")
    return 2 * counts["with"] < counts["without"]


def shown(mode: str, found: dict[str, Any] | None) -> str:
    """Return a line on one mode."""
    if found is None:
        return f"{mode}: the engine did not survive"
    if "equal" not in found:
        return f"{mode}: done"
    return (
        f"{mode}: {found['failures']} failures, {found['recoveries']} recoveries, "
        f"{found['finished']} of {found['requests']} others finished, {found['equal']} equal, "
        f"{found['ended']} of {found['offenders']} offenders ended, {found['refused']} refused, "
        f"{found['blocks_lost']} blocks lost"
    )


def report(found: dict[str, dict[str, Any] | None]) -> bool:
    """Print the rows of the modes; return whether all goals are met."""
    modes = {mode: found[mode] for mode in MODES if mode in found}
    alive = [one for one in modes.values() if one is not None]
    if not alive:
        return not modes
    names = ("failures", "finished", "requests", "equal", "offenders", "with_numbers", "refused")
    total = {name: sum(one[name] for one in alive) for name in names}
    took_ms = sorted(ms for one in alive for ms in one["took_ms"])
    print(f"engines alive: {len(alive)} of {len(modes)}, after {total['failures']} failed steps")
    print(f"other requests finished: {total['finished']} of {total['requests']} (goal: all)")
    print(f"tokens equal: {total['equal']} of {total['requests']} (goal: all)")
    print(
        f"offenders that got their error with numbers: {total['with_numbers']} of "
        f"{total['offenders']}; refused when sent again: {total['refused']} (goal: all)"
    )
    median_ms = statistics.median(took_ms)
    print(
        f"pause of a recovery beyond the recomputation: median {median_ms:.1f} ms, worst "
        f"{took_ms[-1]:.0f} ms (goals: {PAUSE_GOAL_MS:g}, {WORST_GOAL_MS:g})"
    )
    return (
        len(alive) == len(modes)
        and total["finished"] == total["equal"] == total["requests"]
        and total["with_numbers"] == total["refused"] == total["offenders"]
        and median_ms <= PAUSE_GOAL_MS
        and took_ms[-1] <= WORST_GOAL_MS
    )


def report_leak(found: dict[str, Any] | None) -> bool:
    """Print the memory after many recoveries beside that after a tenth of them."""
    if found is None:
        return True
    first, last = found["measured"]
    more_bytes = last["rss"] - first["rss"]
    print(
        f"after {last['failures']} failed steps, compared with {first['failures']}: "
        f"{last['free'] - first['free']:+d} free blocks, {more_bytes / 2**20:+.1f} MiB, "
        f"{last['tensors'] - first['tensors']:+d} tensors, {found['requests_left']} requests kept"
    )
    return (
        last["free"] == first["free"]
        and more_bytes <= RSS_GOAL_BYTES
        and last["tensors"] <= first["tensors"]
        and found["requests_left"] == 0
    )


def interval(ordered: list[float]) -> tuple[float, float]:
    """Return the values between which the median lies with at least 95 percent confidence."""
    count = len(ordered)
    skipped = 0
    while sum(math.comb(count, k) for k in range(skipped + 2)) / 2**count <= 0.025:
        skipped += 1
    return ordered[skipped], ordered[-1 - skipped]


def report_cost(found: dict[str, Any] | None) -> bool:
    """Print the throughput with the recovery in place, beside the plain engine in turns."""
    if found is None:
        return True
    medians = []
    for key, what in (("taken", "clock"), ("busy", "processor")):
        taken = found[key]
        ratios = sorted(a / b for a, b in zip(taken["without"], taken["with"], strict=True))
        medians.append(statistics.median(ratios))
        low, high = interval(ratios)
        print(
            f"throughput while nothing fails, beside the plain engine in {len(ratios)} turns, by "
            f"the {what}: {medians[-1]:.4f} (goal: {COST_GOAL_RATIO}; 95% interval of the median "
            f"{low:.4f} to {high:.4f})"
        )
    return medians[0] >= COST_GOAL_RATIO


if __name__ == "__main__":
    sys.exit(main())
