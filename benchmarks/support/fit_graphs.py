"""What CUDA graphs take, fitted on published starts: constants for all versions, a factor of each
span of versions, and one of Blackwell.

The model is ``ratio x (sum of count x constant) + buffers`` (fixed_parts.py). Its
logarithm is fitted, by steps of Gauss and Newton whose weights fall with the residual, so that no
start that printed something else pulls at it; all is drawn to the same size of each term, and
factors to one. A start that may have an old driver counts as one where that is clearly nearer.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from oomguard.core.facts import GIB
from oomguard.estimate.constants import tables as constants_of
from support.fit_parts import Row, center, weights_of
from support.published import graphs_gib

# The first engine captured steps that only decode; from 0.11 on most sizes have two graphs; from
# 0.27 on the estimate is made outside of what is profiled (determine_available_memory in
# vllm/v1/worker/gpu_worker.py); from 0.29 on it has loaded all kernels before.
GRAPH_VERSIONS = ("<0.8", ">=0.8,<0.11", ">=0.11,<0.27", ">=0.27,<0.29", ">=0.29")
OLD_DRIVER = constants_of()["old_driver"]
FINE = {"bytes_per_token_and_hidden": 2, "copies_of_fp4_scales": 3}
# Weights of the priors, in starts: of each constant, of each factor.
CONSTANT_DRAWN_BY = 1.0
FACTOR_DRAWN_BY = 0.3
# Residuals beyond count less; an old driver must be nearer by so much, as logarithms.
ROBUST_FROM = 0.15
OLD_NEARER_BY = 0.6
ROUNDS = 300
MOST_STEP = 0.5
LEAST_STEP = 1e-4


class Starts(NamedTuple):
    """Measured starts as arrays: what is counted, what buffers take and what was found in GiB, and
    whose constants and factors count.
    """

    counted: Any
    buffers: Any
    found: Any
    drivers: Any
    factors: Any
    may_be_old: Any
    weights: Any


class Solved(NamedTuple):
    """Constants in GiB, factors as logarithms, and each start's residual as one."""

    constants: Any
    factors: Any
    residuals: Any


def fit_graphs(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows of fitted.toml. AMD's graphs are left out: no plan's constants are of theirs;
    their estimates are like others'.
    """
    measured = [row for row in rows if graphs_gib(row) and row["graphs"] and not row["rocm"]]
    solved = _solve(_starts(measured))
    blackwell = math.exp(solved.factors[-1])
    groups = [row["group"] for row in measured]
    residuals = list(zip(groups, solved.residuals.tolist(), strict=True))
    _, spread = center(residuals, None)
    ratio, _ = center(_estimates(rows), None)
    names = list(measured[0]["graph_counts"])
    found = []
    for number, versions in enumerate(GRAPH_VERSIONS):
        own = [place for place, row in enumerate(measured) if _is_of(row["by_engine"], versions)]
        _, around = center([residuals[place] for place in own], 0.0)
        sizes = dict(
            zip(names, (math.exp(solved.factors[number]) * solved.constants).tolist(), strict=True)
        )
        scaled = {
            name: size if name == "copies_of_fp4_scales" else size * GIB
            for name, size in sizes.items()
        }
        estimates = _estimates([row for row in rows if _is_of(row["by_engine"], versions)])
        found.append(
            {
                "versions": versions,
                **{name: round(size, FINE.get(name)) for name, size in scaled.items()},
                "blackwell_ratio": round(blackwell, 3),
                "estimate_ratio": round(math.exp(center(estimates, ratio)[0]), 3),
                "uncertainty_ratio": round(math.expm1(max(around, spread / 2)), 3),
                "starts": len(own),
            }
        )
    return found


def _starts(measured: list[Row]) -> Starts:
    counted = np.array([list(row["graph_counts"].values()) for row in measured], dtype=float)
    counted[:, list(measured[0]["graph_counts"]).index("copies_of_fp4_scales")] /= GIB
    factors = [
        [float(_is_of(row["by_engine"], versions)) for versions in GRAPH_VERSIONS]
        + [float(row["blackwell"])]
        for row in measured
    ]
    return Starts(
        counted,
        np.array([row["graph_buffers_gib"] for row in measured]),
        np.array([graphs_gib(row) for row in measured], dtype=float),
        np.array([row["driver_ratio"] for row in measured]),
        np.array(factors),
        np.array([may_be_old(row) for row in measured]),
        np.array(weights_of(row["group"] for row in measured)),
    )


def _solve(starts: Starts) -> Solved:
    """Fit the logarithms of constants and factors."""
    scales = np.array(
        [
            np.median(column[column > 0]) if (column > 0).any() else 1.0
            for column in starts.counted.T
        ]
    )
    counted = starts.counted / scales * starts.drivers[:, None]
    prior = np.full(counted.shape[1], math.log(np.median(starts.found) / 4))
    sizes = prior.copy()
    factors = np.zeros(starts.factors.shape[1])
    drawn = np.concatenate(
        [np.full(len(sizes), CONSTANT_DRAWN_BY), np.full(len(factors), FACTOR_DRAWN_BY)]
    )
    residuals = np.zeros(len(counted))
    for _ in range(ROUNDS):
        terms = counted * np.exp(sizes) * np.exp(starts.factors @ factors)[:, None]
        ratios, residuals = _nearer_drivers(starts, terms.sum(axis=1))
        planned = ratios * terms.sum(axis=1) + starts.buffers
        slopes = (
            np.hstack([terms, terms.sum(axis=1)[:, None] * starts.factors])
            * (ratios / planned)[:, None]
        )
        weights = starts.weights / np.sqrt(1 + (residuals / ROBUST_FROM) ** 2)
        towards = np.concatenate([prior - sizes, -factors]) * drawn
        curved = slopes.T @ (slopes * weights[:, None]) + np.diag(drawn)
        step = np.linalg.solve(curved, slopes.T @ (weights * residuals) + towards).clip(
            -MOST_STEP, MOST_STEP
        )
        sizes, factors = sizes + step[: len(sizes)], factors + step[len(sizes) :]
        if np.abs(step).max() < LEAST_STEP:
            break
    return Solved(np.exp(sizes) / scales, factors, residuals)


def _nearer_drivers(starts: Starts, planned: Any) -> tuple[Any, Any]:
    """Return the ratio of each start's driver beside the one that it printed, and its residual with
    it.
    """
    old = OLD_DRIVER["graphs_ratio"]
    plain = np.log(starts.found / (planned + starts.buffers))
    other = np.log(starts.found / (old * planned + starts.buffers))
    nearer = starts.may_be_old & (np.abs(other) + OLD_NEARER_BY < np.abs(plain))
    return np.where(nearer, old, 1.0), np.where(nearer, other, plain)


def may_be_old(row: Row) -> bool:
    """Whether a start's driver may be one before CUDA 12.4's: it was not printed, and the version's
    wheels take one.
    """
    return (
        row["driver"] is None
        and not row["rocm"]
        and Version(row["vllm_version"]) < Version(OLD_DRIVER["not_since"])
    )


def _estimates(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """Return by how much the engine's own estimate was above what the graphs took, as a logarithm,
    by group.
    """
    both = [
        (row["group"], row["printed"].get("graph_estimated_gib"), row["printed"].get("graph_gib"))
        for row in rows
    ]
    return [
        (group, math.log(estimate / took))
        for group, estimate, took in both
        if estimate and took and took > 0
    ]


def _is_of(version: str, versions: str) -> bool:
    return Version(version).base_version in SpecifierSet(versions)
