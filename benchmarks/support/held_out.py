"""Published starts predicted by constants that were not fitted on them: each group of a version and
a device by the other groups'.

A set of starts that was gathered together is predicted by the other sets in the same way.
"""

import math
from dataclasses import replace
from typing import Any

from oomguard.core.facts import GIB
from oomguard.estimate import constants
from oomguard.estimate.start import encoder_profile, fixed_parts, start, start_budget
from support.fit_graphs import fit_graphs
from support.fit_parts import Row, fit_encoders, fit_non_torch
from support.published import PARTS, graphs_gib, group_of, of_stage, part_gib, planned, pool_gib

ORIGINAL = constants.tables
NOTHING_KEPT = {"elsewhere": {"spread_ratio": 0.0, "quantile": 0.5, "starts": 0}}
DEVICE_RATIO = 0.01
PLAIN_RANGE = {"all": {"device_ratio": DEVICE_RATIO, "factor_below": 1.0, "factor_above": 1.0}}


def fit(rows: list[Row]) -> dict[str, Any]:
    """Return the tables of constants that the rows give; each row has its plan and what was counted
    for it.
    """
    certain = [row for row in rows if sure(row)]
    unified = [row for row in rows if row["unified"]]
    return {
        "cudagraphs": fit_graphs(certain),
        "non_torch": fit_non_torch(certain, unified),
        "encoder_mlp": fit_encoders(certain),
        "range": PLAIN_RANGE,
        "kept_back": NOTHING_KEPT,
        "measured": [],
    }


def sure(row: Row) -> bool:
    """Whether a row's device is a GPU of its own and its finder is sure of its settings."""
    return not row["unified"] and row["confidence"].split()[0] != "low"


def use(tables: dict[str, Any]) -> None:
    """Plan with these tables in place of the package's own."""
    whole = {**ORIGINAL(), **tables}
    constants.tables = lambda: whole


def with_counts(row: Row) -> Row | None:
    """Return a row with its ranks, its stages and how many bytes one byte a layer and graph comes
    to; None where there is no plan.
    """
    seen: dict[str, Any] = {}
    counted = fixed_parts.cuda_graphs
    linked = start.has_nvlink
    profiled = encoder_profile.profile_encoder

    def noted(settings: Any, shape: Any) -> Any:
        seen.setdefault(
            "settings", settings
        )  # the start's own; a plan that does not fit solves others after it
        seen.setdefault("shape", shape)
        return counted(settings, shape)

    def noted_encoder(*of: Any) -> Any:
        return seen.setdefault("encoder", profiled(*of))

    fixed_parts.cuda_graphs = noted
    encoder_profile.profile_encoder = noted_encoder
    try:
        plan = of_stage(planned(row), row.get("stage"))
    finally:
        fixed_parts.cuda_graphs = counted
        encoder_profile.profile_encoder = profiled
    if isinstance(plan, str):
        print(f"no plan of {row['id']}: {plan}")
        return None
    settings = seen["settings"]
    shape = seen["shape"]
    known = start.known_gpu(settings)
    return {
        **row,
        # A device that two finders name otherwise is one.
        "group": group_of(row, known["name"]) if known else row["group"],
        "known_gpu": known is not None,
        "ranks": settings.tensor_parallel_size,
        "stages": settings.pipeline_parallel_size,
        "nvlink": int(linked(settings)),
        "unified": settings.unified_memory,
        "rocm": start.is_rocm(settings),
        "hopper": int(start.is_hopper_or_later(settings)),
        "fused_gib": start.fused_allreduce_bytes(settings) / GIB,
        "graphs": 0
        if settings.enforce_eager
        else fixed_parts.graph_counts(settings, shape)["bytes"],
        "graph_counts": fixed_parts.graph_counts(settings, shape),
        "graph_buffers_gib": fixed_parts.graph_buffers_bytes(
            settings, shape, fixed_parts.largest_decode_step(settings)
        )
        / GIB,
        "blackwell": fixed_parts.graphs_ratio(replace(settings, driver_version=None), 2.0) > 1,
        "driver": settings.driver_version,
        "driver_ratio": fixed_parts.driver_ratio(settings.driver_version),
        "by_engine": str(fixed_parts.by_engine(settings)),
        "left_gib": left_gib(row, plan, may_pin=start_budget.pinned_bytes(settings, shape) > 0),
        "mlp_tensors": mlp_tensors(row, plan, seen.get("encoder"), settings),
        "spans": plan["page_cache_bytes"] > 0,
        "counted": not any(
            line.startswith("images, audio and video:") for line in plan["assumptions"]
        ),
    }


def mlp_tensors(row: Row, plan: dict[str, Any], encoder: Any, settings: Any) -> float | None:
    """Return how many tensors of its MLP's width an encoder took beyond those of every version,
    where it made the peak of the start.
    """
    pool = pool_gib(row, plan)
    if (
        encoder is None
        or not encoder.mlp_tensor_bytes
        or not pool
        or encoder.peak_bytes < plan["peak_activation_bytes"]
    ):
        return None
    printed = row["printed"]
    planned_gib = part_gib(plan, "activation")
    weights = printed.get("weights_gib") or part_gib(plan, "weights")
    left = planned_gib + _parts_leave_gib(plan) - pool - weights + part_gib(plan, "weights")
    beyond = (printed.get("peak_activation_gib") or left) - planned_gib
    now: float = constants.constant("encoder_mlp", settings.version)["tensors_more"]
    return now + beyond * GIB / encoder.mlp_tensor_bytes


def left_gib(row: Row, plan: dict[str, Any], *, may_pin: bool) -> float | None:
    """Return what a start had as non-torch memory: as printed, else what its weights, its peak and
    its pool leave of the plan's sum.

    A start that may have pinned a table in torch's allocator tells it only by what it printed.
    """
    printed = row["printed"]
    if printed.get("non_torch_gib") is not None:
        return float(printed["non_torch_gib"])
    pool = pool_gib(row, plan)
    if pool is None or may_pin:
        return None
    left = part_gib(plan, "non_torch") + _parts_leave_gib(plan) - pool
    for part in ("weights", "activation"):
        theirs = printed.get(PARTS[part][0])
        left -= theirs - part_gib(plan, part) if theirs else 0.0
    return float(left)


def _parts_leave_gib(plan: dict[str, Any]) -> float:
    return (plan["kv_cache_pool_bytes"] + plan["kept_back_bytes"]) / GIB


def held_out(rows: list[Row], by: str = "group") -> list[dict[str, Any]]:
    """Predict each group by the constants of the others, or what was ``gathered`` together; return
    a record of each start.
    """
    records = []
    for group in sorted({row[by] for row in rows}):
        use(fit([row for row in rows if row[by] != group]))
        records += [record_of(row) for row in rows if row[by] == group]
    return records


def record_of(row: Row) -> dict[str, Any]:
    plan = of_stage(planned(row), row.get("stage"))
    printed = row["printed"]
    found = {"row": row, "pool": None, "graphs": None}
    pool = pool_gib(row, plan)
    graphs = graphs_gib(row)
    if pool and pool > 0:
        found["pool"] = plan["kv_cache_pool_bytes"] / GIB / pool - 1
        found["beyond_gib"] = plan["kv_cache_pool_bytes"] / GIB - pool
        found["pool_gib"] = pool
        page_cache = plan["page_cache_bytes"] / GIB
        found["page_cache_gib"] = page_cache
        found["spread_gib"] = math.sqrt(
            max(0.0, (plan["uncertainty_bytes"] / GIB) ** 2 - page_cache**2)
        )
        found["more_gib"] = plan["more_bytes"] / GIB
    if graphs and plan["cudagraph_bytes"]:
        found["graphs"] = plan["cudagraph_bytes"] / GIB / graphs - 1
    for part, (name, _) in PARTS.items():
        theirs = printed.get(name)
        if theirs:
            if part == "non_torch":
                found[part] = part_gib(plan, part) - theirs
            else:
                found[part] = part_gib(plan, part) / theirs - 1
    return found
