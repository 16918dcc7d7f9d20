"""Figure: errors of `oomguard plan` beside what vLLM 0.19 logged on an H100: weights, peak
activation, KV pool, tokens.

The measurements are llm-d-planner's and lie in ../shared/data, not in the repository. The
activation's constants were fitted on models of this table, so their error here is in sample. Out of
sample: each model's starts are predicted with the constants that the other models' starts give,
fitted anew here. benchmarks/published_starts.py has other versions and devices.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from packaging.version import Version

from oomguard.core.facts import GIB
from oomguard.estimate.constants import constant
from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.activations import ActivationPeak, peak_activation
from oomguard.estimate.start.start import StartBudget, VllmSettings
from oomguard.estimate.start.start_budget import budget_start
from support.figure import conclude, skip

TABLE = Path(__file__).parents[2] / "shared" / "data" / "llmd_v019_dev.json"
TOTAL_GIB = 79.19
UTILIZATION = 0.95
VERSION = Version("0.19.0")
SEQS = 1024
TOKENS = 8192


def planned(run: dict) -> StartBudget:
    """What oomguard says of a run's start, from its configuration and settings only."""
    settings = VllmSettings(
        version=VERSION,
        gpu_total_bytes=round(TOTAL_GIB * GIB),
        gpu_memory_utilization=UTILIZATION,
        tensor_parallel_size=run["tensor_parallel_size"],
        pipeline_parallel_size=run["pipeline_parallel_size"],
        kv_cache_dtype=run.get("kv_cache_dtype", "auto"),
        max_num_seqs=SEQS,
        max_num_batched_tokens=TOKENS,
    )
    return budget_start(
        read_model(ModelFiles(run["model"], "config.json", run["config"], None)), settings
    )


def pool_gib(run: dict) -> tuple[float | None, str]:
    """The measured pool, or by the table's identity where all its terms were measured."""
    measured = run["measured_gib"]
    if measured["kv_pool"] is not None:
        return measured["kv_pool"], "measured"
    terms = [measured[name] for name in ("weights", "peak_activation", "non_torch")]
    if None in terms:
        return (None, "")
    return (UTILIZATION * TOTAL_GIB - sum(terms), "identity")


def refitted(runs: list[dict]) -> dict[str, float]:
    """The three constants of the activation's formula that fit these starts best, by least squares
    of the relative error.
    """
    row = constant("activations", VERSION, runner=1)
    found = {
        name: float(row[name])
        for name in ("bytes_per_logit", "sampler_base_bytes", "step_base_bytes")
    }
    for _ in range(5):  # which of the two terms is the larger follows from the constants
        sampled = []
        stepped = []
        for run in runs:
            peak = terms(run, found)
            total = run["measured_gib"]["peak_activation"] * GIB
            if peak.sampler_bytes >= peak.step_bytes:
                sampled.append(
                    (rows_of_logits(run) / total, 1 / total, 1 - peak.workspace_bytes / total)
                )
            else:
                rest = total - peak.workspace_bytes - (peak.step_bytes - found["step_base_bytes"])
                stepped.append((1 / total, rest / total))
        if len({weight for weight, _, _ in sampled}) > 1:
            found["bytes_per_logit"], found["sampler_base_bytes"] = two_unknowns(sampled)
        if stepped:
            found["step_base_bytes"] = sum(a * b for a, b in stepped) / sum(
                a * a for a, _ in stepped
            )
    return found


def two_unknowns(rows: list[tuple[float, float, float]]) -> tuple[float, float]:
    """x and y of a * x + b * y = c in the least squares; a base below zero is none."""
    aa, ab, bb, ac, bc = (
        sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    )
    base = (aa * bc - ab * ac) / (aa * bb - ab * ab)
    if base > 0:
        return ((ac - ab * base) / aa, base)
    return (ac / aa, 0.0)


def rows_of_logits(run: dict) -> int:
    return SEQS * read_shape(run["config"]).vocab


def terms(run: dict, constants: dict[str, float]) -> ActivationPeak:
    """The peak of a start's fullest rank with these constants in place of the table's."""
    plan = planned(run)
    last = run["pipeline_parallel_size"] - 1
    number = [stage.peak_activation_bytes for stage in plan.stages].index(
        plan.peak_activation_bytes
    )
    return peak_activation(
        read_shape(run["config"]),
        VERSION,
        rows=SEQS,
        step_tokens=TOKENS,
        tensor_parallel_size=run["tensor_parallel_size"],
        first_stage=number == 0,
        last_stage=number == last,
        changed=constants,
    )


def left_out(runs: list[dict]) -> list[float]:
    """Errors in percent of each model's peaks, with the constants of all other models."""
    measured = [run for run in runs if run["measured_gib"]["peak_activation"]]
    errors = []
    for model in dict.fromkeys(run["model"] for run in measured):
        found = refitted([run for run in measured if run["model"] != model])
        own = [run for run in measured if run["model"] == model]
        errors += [
            100 * (terms(run, found).bytes / GIB / run["measured_gib"]["peak_activation"] - 1)
            for run in own
        ]
    return errors


def line(
    name: str,
    errors: Iterable[float],
    mean_goal: float | None = None,
    worst_goal: float | None = None,
) -> tuple[str, bool]:
    """Mean and worst absolute error in percent and the mean with its sign, beside the goals; and
    whether they are met.
    """
    found = list(errors)
    if not found:
        return f"{name}: none measured", True
    mean = sum(map(abs, found)) / len(found)
    worst = max(found, key=abs)
    signed = sum(found) / len(found)
    goals = [
        f"{word} <= {goal} %"
        for word, goal in (("mean", mean_goal), ("worst", worst_goal))
        if goal is not None
    ]
    met = (mean_goal is None or mean <= mean_goal) and (
        worst_goal is None or abs(worst) <= worst_goal
    )
    text = (
        f"{name}: mean {mean:.2f} %, worst {worst:+.2f} %, signed {signed:+.2f} %, n = {len(found)}"
    )
    return f"{text} (goal {', '.join(goals)})" if goals else text, met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "table",
        nargs="?",
        type=Path,
        default=TABLE,
        help="measurements in the form of ../shared/data",
    )
    table = parser.parse_args().table
    if not table.is_file():
        skip(f"{table} is not here: the measurements are no part of the repository")
    weights = []
    peaks = []
    single = []
    several = []
    tokens = []
    runs = json.loads(table.read_text())["runs"]
    for run in runs:
        plan = planned(run)
        measured = run["measured_gib"]
        row = (
            f"{run['model']:26} TP {run['tensor_parallel_size']} PP {run['pipeline_parallel_size']}"
        )
        if run["tensor_parallel_size"] * run["pipeline_parallel_size"] == 1:
            pools = single
        else:
            pools = several
        for name, mine, theirs, errors in (
            ("weights", plan.weights_bytes / GIB, measured["weights"], weights),
            ("activation", plan.peak_activation_bytes / GIB, measured["peak_activation"], peaks),
            ("pool", plan.kv_cache_pool_bytes / GIB, pool_gib(run)[0], pools),
            ("tokens", plan.kv_cache_tokens, run["measured_kv_tokens"], tokens),
        ):
            if theirs:
                errors.append(100 * (mine / theirs - 1))
                row += f"  {name} {mine:,.2f} / {theirs:,.2f}"
        print(row)
    lines = [
        line("peak activation, in sample", peaks),
        line("KV tokens", tokens),
        line("weights", weights, 0.5),
        line("peak activation, each model by the others", left_out(runs), 5),
        line("KV pool, one GPU", single, 1, 3),
        line("KV pool, TP or PP", several, 2),
    ]
    for text, _ in lines[:2]:
        print(text)
    conclude("; ".join(text for text, _ in lines[2:]), met=all(met for _, met in lines))


if __name__ == "__main__":
    main()
