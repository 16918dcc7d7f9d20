"""Constants of single parts of a start, fitted on published ones: non-torch memory and encoders;
fit_graphs.py has CUDA graphs.

Each constant is drawn towards that of all versions, the more the fewer groups it has; medians,
because a start now and then printed what something else took.
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from oomguard.core.facts import GIB

Row = dict[str, Any]
# Until 0.6.5 the CUDA context counted in it: vllm/worker/worker.py. From 0.27 on all that the
# driver says is gone does, what torch's allocator keeps between tensors too, and no start prints it
# by itself (memory_profiling in vllm/utils/mem_utils.py).
OTHER_VERSIONS = ("<0.6.5", ">=0.6.5,<0.8", ">=0.8,<0.11", ">=0.11,<0.22", ">=0.22,<0.27", ">=0.27")
# Before 0.13 attention took more than the MLP; from 0.24 on starts took more than the sources say.
ENCODER_VERSIONS = ("<0.13", ">=0.13,<0.24", ">=0.24")
UNPRINTED_SINCE = Version("0.27")
LEFT_FROM = Version("0.11")
LEFT_UNTIL = Version("0.20")
# Stages of which none was measured are like so many ranks without links. Until 0.11 the
# communicators between stages were made behind the first look at the device, as those between
# ranks, and counted (init_device in vllm/worker/worker.py of 0.8.5, vllm/v1/worker/gpu_worker.py of
# 0.10.2 and 0.11.0); from 0.27 on all that the driver says is gone counts: a start of two stages
# left 1.5 GiB for it and the sampler's share, one of two ranks 1.0.
STAGED_LIKE = {"<0.6.5": 2, ">=0.6.5,<0.8": 2, ">=0.8,<0.11": 2, ">=0.27": 2}
# Rows of one group say little more than one another: so many of them count as one that is known
# well.
MOST_OF_A_GROUP = 5
DRAWN_BY = 0.1
SPREAD = 0.7
# What an encoder takes beyond its sources is mostly what the other parts leave: none is as likely
# as one group says.
ENCODER_DRAWN_BY = 1.0


def center(
    values: Iterable[tuple[str, float]], towards: float | None, drawn_by: float = DRAWN_BY
) -> tuple[float, float]:
    """Return the median over groups, drawn towards a value, and how far seven in ten lie from it at
    most.
    """
    found = list(values)
    weighted = [
        (value, weight)
        for (_, value), weight in zip(found, weights_of(group for group, _ in found), strict=True)
    ]
    weight = sum(w for _, w in weighted)
    if weighted:
        own = weighted_quantile(weighted, 0.5)
    else:
        own = 0.0
    if towards is None:
        at = own
    else:
        at = (weight * own + drawn_by * towards) / (weight + drawn_by)
    return at, weighted_quantile(
        [(abs(value - at), w) for value, w in weighted], SPREAD
    ) if weighted else 0.0


def weights_of(groups: Iterable[str]) -> list[float]:
    """Return what each row of these groups counts."""
    named = list(groups)
    sizes = Counter(named)
    return [math.sqrt(min(sizes[group], MOST_OF_A_GROUP)) / sizes[group] for group in named]


def weighted_quantile(values: list[tuple[float, float]], share: float) -> float:
    """Return the value below which a share of the weights lies."""
    total = sum(w for _, w in values)
    seen = 0.0
    for value, w in sorted(values):
        seen += w
        if seen >= share * total:
            return value
    return max(values)[0]


def of_versions(rows: list[Row], versions: str) -> list[Row]:
    """Return the rows of these versions."""
    return [
        row for row in rows if Version(row["vllm_version"]).base_version in SpecifierSet(versions)
    ]


def fit_non_torch(rows: list[Row], unified: list[Row]) -> list[dict[str, Any]]:
    """Fit non-torch memory by ranks, links, GPU and version; apart on AMD's GPUs and where the
    host's programs share it.
    """
    measured = [
        row
        for row in rows
        if _others_gib(row) is not None and (row["stages"] == 1 or row["ranks"] > 1)
    ]
    nvidia = [row for row in measured if not row["rocm"]]
    tables = []
    for ranks, link, hopper in ((1, 0, 0), (1, 0, 1), (2, 0, 0), (4, 0, 0), (2, 1, 0), (2, 1, 1)):
        alike = [row for row in nvidia if _is_like(row, ranks, link, hopper)]
        middle, spread = center(_others(alike), None)
        for versions in OTHER_VERSIONS:
            own = _others(of_versions(alike, versions))
            value, around = center(own, middle)
            where = {"tensor_ranks": ranks, "nvlink": link, "hopper": hopper}
            tables.append(_row(versions, value, max(around, spread / 2), len(own), **where))
    tables += _fit_staged([row for row in rows if not row["rocm"]], tables)
    others = [
        (row["group"], row["left_gib"])
        for row in rows
        if row["rocm"] and row["ranks"] * row["stages"] == 1
    ]
    for group, name in (
        (others, "rocm"),
        ([(row["group"], row["left_gib"]) for row in unified], "unified"),
    ):
        known = [(place, gib) for place, gib in group if gib is not None]
        if known:
            value, around = center(known, None)
            tables.append(_row(">=0", value, max(around, value / 2), len(known), **{name: 1}))
    return tables


def _is_like(row: Row, ranks: int, link: int, hopper: int) -> bool:
    """Whether a start is one that such a row of the table is fitted on: of ranks without links the
    GPU does not count.
    """
    fewest = max(least for least in (1, 2, 4) if least <= row["ranks"])
    gpu = row["hopper"] == hopper
    if ranks == 1:
        return fewest == 1 and gpu
    if link:
        return fewest > 1 and row["nvlink"] == 1 and gpu
    return fewest == ranks and row["nvlink"] == 0


def _fit_staged(rows: list[Row], tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit it for pipeline stages of one rank each: measured ones, or like other ranks of a version
    that counts as much of theirs.
    """
    staged = [
        row for row in rows if _others_gib(row) is not None and row["stages"] > 1 == row["ranks"]
    ]
    before = [row for row in staged if Version(row["vllm_version"]) < UNPRINTED_SINCE]
    value, around = center(_others(before), None)
    found = []
    for versions in OTHER_VERSIONS:
        own = _others(of_versions(staged, versions))
        if versions not in STAGED_LIKE:
            found.append(_row(versions, value, around, len(before), stages=2))
            continue
        like = (versions, STAGED_LIKE[versions], 0)
        row = next(r for r in tables if (r["versions"], r["tensor_ranks"], r["nvlink"]) == like)
        if own:
            value_now, around_now = center(own, row["bytes"] / GIB)
            found.append(
                _row(
                    versions,
                    value_now,
                    max(around_now, row["uncertainty_bytes"] / GIB),
                    len(own),
                    stages=2,
                )
            )
        else:
            found.append({**row, "tensor_ranks": 1, "stages": 2, "starts": 0})
    return found


def _row(versions: str, gib: float, around: float, starts: int, **where: int) -> dict[str, Any]:
    places = {
        "tensor_ranks": 1,
        "stages": 1,
        "nvlink": 0,
        "hopper": 0,
        "rocm": 0,
        "unified": 0,
        **where,
    }
    return {
        "versions": versions,
        **places,
        "bytes": round(gib * GIB),
        "uncertainty_bytes": round(around * GIB),
        "starts": starts,
    }


def _others(rows: list[Row]) -> list[tuple[str, float]]:
    return [
        (row["group"], gib - row["fused_gib"])
        for row in rows
        if (gib := _others_gib(row)) is not None
    ]


def _others_gib(row: Row) -> float | None:
    """Return a start's non-torch memory: as printed, or in versions that print none what the other
    parts leave.

    Between 0.11 and 0.20 hardly any start prints it but on Hopper; graphs, which are known least,
    count only after that.
    """
    printed: float | None = row["printed"].get("non_torch_gib")
    version = Version(row["vllm_version"])
    unprinted = version >= UNPRINTED_SINCE or (
        LEFT_FROM <= version < LEFT_UNTIL and not row["hopper"]
    )
    left: float | None = row["left_gib"]
    if printed is not None or not unprinted or row["rocm"] or left is None:
        return printed
    return max(0.0, left)


def fit_encoders(rows: list[Row]) -> list[dict[str, Any]]:
    """Fit how many tensors of its MLP's width a rotary encoder takes beyond those that every
    version makes.

    Under WSL2 what Windows' own programs take meanwhile counts too: such starts say nothing of it.
    """
    rows = [row for row in rows if "wsl2" not in row["flags"]]
    tables = []
    for versions in ENCODER_VERSIONS:
        own = [
            (row["group"], row["mlp_tensors"])
            for row in of_versions(rows, versions)
            if row["mlp_tensors"] is not None
        ]
        value, _ = center(own, 0.0, drawn_by=ENCODER_DRAWN_BY)
        tables.append(
            {"versions": versions, "tensors_more": round(max(0.0, value), 2), "starts": len(own)}
        )
    return tables
