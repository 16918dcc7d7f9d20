"""Published starts of vLLM on GPUs: what their logs printed, and what ``oomguard plan`` says of the
same configuration.

A row has the start's configuration, its flags, the device's total and the printed figures in GiB.
The rows of benchmarks/data are the project's; those of ../shared and llm-d-planner's table are read
where they are there.
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oomguard.cli.plan import command
from oomguard.core.errors import OomguardError
from oomguard.core.facts import GIB
from oomguard.planning.contribution import read_record

OWN = Path(__file__).parents[1] / "data" / "starts.jsonl"
SHARED = Path(__file__).parents[3] / "shared" / "data"
DEV = SHARED / "starts_dev.jsonl"
CAMPAIGN = SHARED / "llmd_v019_dev.json"
PARTS = {
    "weights": ("weights_gib", ("weights_bytes", "draft_weights_bytes")),
    "activation": ("peak_activation_gib", ("peak_activation_bytes",)),
    "non_torch": ("non_torch_gib", ("non_torch_bytes",)),
}


def published(*more: Path, campaign: bool = True) -> list[dict[str, Any]]:
    """Return the rows that are here, each with its ``group`` of version and device and the set that
    it was ``gathered`` in.

    Args:
        more: files of `oomguard contribute`, a record a line.
        campaign: whether llm-d-planner's table counts.
    """
    rows = [json.loads(line) for line in OWN.read_text().splitlines()]
    if DEV.is_file():
        rows += [
            {**json.loads(line), "gathered": "shared"} for line in DEV.read_text().splitlines()
        ]
    if campaign and CAMPAIGN.is_file():
        rows += list(_of_campaign())
    for file in more:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            record = read_record(line, f"{file}, line {number}")
            row = {"id": f"{file.stem}-{number}", "confidence": "high", **record}
            rows.append({**row, "gpu": row["gpu"] or f"{row['gpu_total_gib']:.0f} GiB"})
    for row in rows:
        row.setdefault("gathered", "records")
        row["group"] = group_of(row, row["gpu"].split(" x")[0].split("(")[0].strip())
    return rows


def group_of(row: dict[str, Any], device: str) -> str:
    """Return the group of a start: its minor version and its device."""
    return f"{'.'.join(row['vllm_version'].split('.')[:2])} {device}"


def _of_campaign() -> Iterator[dict[str, Any]]:
    for number, run in enumerate(json.loads(CAMPAIGN.read_text())["runs"]):
        measured = run["measured_gib"]
        ranks = ["--tensor-parallel-size", run["tensor_parallel_size"]]
        stages = ["--pipeline-parallel-size", run["pipeline_parallel_size"]]
        share = [
            "--gpu-memory-utilization",
            0.95,
            "--max-num-seqs",
            1024,
            "--max-num-batched-tokens",
            8192,
        ]
        if run.get("kv_cache_dtype"):
            cache = ["--kv-cache-dtype", run["kv_cache_dtype"]]
        else:
            cache = []
        yield {
            "id": f"campaign-{number}-{run['model']}",
            "vllm_version": "0.19.0",
            "gpu": "H100",
            "gpu_total_gib": 79.19,
            "gathered": "campaign",
            "config": run["config"],
            "flags": [str(word) for word in (*ranks, *stages, *share, *cache)],
            "confidence": "high",
            "printed": {
                "weights_gib": measured["weights"],
                "available_kv_gib": measured["kv_pool"],
                "peak_activation_gib": measured["peak_activation"],
                "non_torch_gib": measured["non_torch"],
                "kv_tokens": run.get("measured_kv_tokens"),
            },
        }


def planned(row: dict[str, Any]) -> dict[str, Any] | str:
    """Return the plan of a row's start as JSON has it, or the error that refuses it."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        Path(folder, "config.json").write_text(json.dumps(row["config"]))
        given = [
            "--device",
            "cuda",
            "--engine-version",
            row["vllm_version"],
            "--no-calibration",
            "--format",
            "json",
        ]
        size = ["--gpu-memory", str(round(row["gpu_total_gib"] * GIB))]
        if "--gpu-name" not in row["flags"]:
            size += ["--gpu-name", row["gpu"]]
        if row.get("unified"):
            size += ["--memory-kind", "unified"]
        try:
            command([folder, *given, *size, *row["flags"]], standalone_mode=False)
        except OomguardError as error:
            return str(error)
    found: dict[str, Any] = json.loads(said.getvalue().splitlines()[-1])
    if "error" in found:
        return str(found["error"])
    return found


def of_stage(plan: Any, stage: int | None) -> Any:
    """Return a plan with the bytes of one pipeline stage, where a row printed those of another
    stage than the fullest.
    """
    if stage is None or isinstance(plan, str):
        own = {}
    else:
        own = {name: size for name, size in plan["stages"][stage].items() if name != "stage"}
    if own:
        return {**plan, **own}
    return plan


def pool_gib(row: dict[str, Any], plan: dict[str, Any]) -> float | None:
    """Return the printed pool, or the size of the printed tokens if it was not printed.

    The tokens are whole blocks, so they are compared with the plan's whole blocks: a part of a
    block would make the result depend on the constants that are fitted to it.
    """
    printed = row["printed"]
    if printed.get("available_kv_gib"):
        return float(printed["available_kv_gib"])
    tokens = printed.get("kv_tokens")
    if tokens:
        blocks = plan["kv_cache_blocks"]
        pool_bytes = plan["kv_cache_pool_bytes"]
        whole_bytes = blocks * plan["kv_cache_block_tokens"] * plan["kv_bytes_per_token"]
        # Layers with a state take memory beyond the tokens; only then the whole pool counts.
        if pool_bytes - whole_bytes < pool_bytes / blocks:
            pool_bytes = whole_bytes
        return pool_bytes / GIB * tokens / plan["kv_cache_tokens"]
    return None


def graphs_gib(row: dict[str, Any]) -> float | None:
    """Return what the graphs took when they were captured, else the engine's own estimate."""
    printed = row["printed"]
    found = printed.get("graph_gib") or printed.get("graph_estimated_gib")
    if found and found > 0:
        return float(found)
    return None


def part_gib(plan: dict[str, Any], part: str) -> float:
    """Return a part of a plan in GiB."""
    return sum(plan.get(name, 0) for name in PARTS[part][1]) / GIB
