"""Compare the plans of one start under two versions of vLLM: defaults, parts, and KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from oomguard.core.facts import format_gib
from oomguard.core.records import Record
from oomguard.estimate.start.activations import model_runner
from oomguard.estimate.start.fixed_parts import counts_graphs
from oomguard.estimate.start.start import StartBudget
from oomguard.planning.start import StartPlan, StartRequest, plan_start

# Settings whose default differs between versions and changes the pool or the requests in it.
_DEFAULTS: Final = (
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
)


@dataclass(frozen=True, slots=True)
class UpgradeRow:
    """Compare one thing of two plans.

    ``kind`` is ``default``, ``part`` (bytes that the version takes from the pool), ``pool`` (bytes)
    or ``capacity``.
    """

    name: str
    kind: str
    old: int | float | None
    new: int | float | None

    @property
    def change(self) -> float | None:
        """Return new minus old, or None unless both are numbers."""
        if self.old is None or self.new is None:
            return None
        return self.new - self.old


@dataclass(frozen=True, slots=True, repr=False)
class Upgrade(Record):
    """Report what a change of vLLM's version does to one start.

    Attributes:
        old: the plan under the old version.
        new: the plan under the new version.
        rows: defaults that differ, every part, the pool, and its capacity.
        reasons: one sentence for each known cause of a change.
    """

    old: StartPlan
    new: StartPlan
    rows: tuple[UpgradeRow, ...]
    reasons: tuple[str, ...]

    @property
    def pool_ratio(self) -> float | None:
        """Return the new pool as a ratio of the old one, or None if the old one is empty."""
        before = self.old.budget.kv_cache_pool_bytes
        if before <= 0:
            return None
        return self.new.budget.kv_cache_pool_bytes / before


def plan_upgrade(old: StartRequest, new: StartRequest) -> Upgrade:
    """Plan a start under two versions of vLLM and compare the plans.

    Args:
        old: the start under the old version.
        new: the same start under the new version.

    Raises:
        SettingError: one of the versions would reject a setting.
    """
    before = plan_start(old)
    after = plan_start(new)
    rows = tuple(_rows(before.budget, after.budget))
    return Upgrade(before, after, rows, tuple(_reasons(new, before.budget, after.budget)))


def _rows(old: StartBudget, new: StartBudget) -> Iterator[UpgradeRow]:
    for name in _DEFAULTS:
        before = getattr(old.settings, name)
        after = getattr(new.settings, name)
        if before != after:
            yield UpgradeRow(name, "default", before, after)
    parts = _parts(old)
    for name, size in _parts(new).items():
        if size or parts[name]:
            yield UpgradeRow(name, "part", parts[name], size)
    yield UpgradeRow("KV cache", "pool", old.kv_cache_pool_bytes, new.kv_cache_pool_bytes)
    for name in ("kv_cache_tokens", "max_concurrency", "longest_request_tokens"):
        yield UpgradeRow(name, "capacity", getattr(old, name), getattr(new, name))


def _parts(budget: StartBudget) -> dict[str, int]:
    """Return what a version takes from the utilization before the pool, in bytes."""
    weights = budget.weights_bytes + budget.draft_weights_bytes + budget.lora_bytes
    return {
        "utilization": budget.requested_bytes,
        "weights": weights,
        "activations": budget.peak_activation_bytes,
        "non-torch": budget.non_torch_bytes,
        "CUDA graphs": _counted_graphs(budget, weights),
        "reserve": budget.kept_back_bytes,
    }


def _counted_graphs(budget: StartBudget, weights_bytes: int) -> int:
    """Return the bytes of CUDA graphs that count before the pool; 0 if they come on top of it."""
    # A requested pool size replaces the utilization, so no part reduces the pool.
    if budget.settings.kv_cache_memory_bytes is not None:
        return 0
    # A budget has no such part, because only some versions count it: it is what the others leave.
    others = weights_bytes + budget.peak_activation_bytes + budget.non_torch_bytes
    others += budget.kept_back_bytes + budget.kv_cache_pool_bytes
    return max(0, budget.requested_bytes - others)


def _reasons(asked: StartRequest, old: StartBudget, new: StartBudget) -> Iterator[str]:
    """Yield a sentence for each known cause of a change."""
    shape = asked.model.shape
    version = new.settings.version
    for name in _DEFAULTS:
        before = getattr(old.settings, name)
        after = getattr(new.settings, name)
        if before != after:
            yield f"vLLM {version} sets {name} to {after} by default, not {before}"
    if counts_graphs(new.settings, shape) and not counts_graphs(old.settings, shape):
        yield f"vLLM {version} takes its estimate of the CUDA graphs from the utilization"
    if counts_graphs(old.settings, shape) and not counts_graphs(new.settings, shape):
        yield f"vLLM {version} no longer takes the CUDA graphs from the utilization"
    runner = model_runner(version, shape)
    if runner != model_runner(old.settings.version, shape):
        yield f"vLLM {version} runs this model with runner {runner}, which profiles another step"
    if new.compile_bytes and not old.compile_bytes:
        size = format_gib(new.compile_bytes)
        yield f"compiling takes {size} more at a first start, which a second one leaves"
    # The sentence above already covers the compiler's bytes, which more_bytes includes.
    more = new.more_bytes - new.compile_bytes
    if more > old.more_bytes - old.compile_bytes:
        yield f"some starts of vLLM {version} leave {format_gib(more)} more than the plan counts"
