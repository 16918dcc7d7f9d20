"""What changed with vLLM's version, as explanations: its engine's generation, and when it counts CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from oomguard.comparing.comparison import ComparedStart, Explanation, RowsByName
from oomguard.facts import format_gib

# From these versions on vLLM: runs V1 unless told otherwise; runs nothing else; counts CUDA graphs before the KV cache.
_V1_BY_DEFAULT: Final = "0.8.0"
_V1_ONLY: Final = "0.11.0"
_GRAPHS_COUNTED: Final = "0.20.0"


def engine_generation(old: ComparedStart, new: ComparedStart) -> Iterator[Explanation]:
    """Explain the change from vLLM's V0 engine to V1."""
    if at_least(old, _V1_BY_DEFAULT) is False and at_least(new, _V1_BY_DEFAULT):
        only = "" if at_least(new, _V1_ONLY) else " by default"
        yield Explanation(
            f"vLLM {old.version} runs its V0 engine, {new.version} its V1 engine{only}: V1 batches more tokens in one step, "
            "captures more CUDA graphs and measures each part in another way."
        )


def graphs_counted(old: ComparedStart, new: ComparedStart, table: RowsByName) -> Iterator[Explanation]:
    """Explain what counting CUDA graphs before the KV cache takes from it."""
    if not newly_counts_graphs(old, new):
        return
    size, before = new.number("cudagraph_bytes"), old.number("cudagraph_bytes")
    text = "Since 0.20 vLLM takes its estimate of the CUDA graphs out of the utilization before it sizes the KV cache"
    ending = "; before, they came on top" + (f" ({format_gib(before)} in OLD)" if before else "")
    if size is None:
        yield Explanation(f"{text}{ending}. How much that is in NEW is not printed.")
    else:
        yield Explanation(f"{text}: {format_gib(size)} less for it{ending}.", -size)


def newly_counts_graphs(old: ComparedStart, new: ComparedStart) -> bool:
    """Return whether only the new start counts CUDA graphs before it sizes the KV cache."""
    on = not new.value("enforce_eager") and not new.value("on_cpu") and not (old.pool_is_given or new.pool_is_given)
    return on and counts_graphs(old) is False and counts_graphs(new) is True


def counts_graphs(side: ComparedStart) -> bool | None:
    """Return whether a start's CUDA graphs come out of the utilization, None if that is unknown."""
    return at_least(side, _GRAPHS_COUNTED)


def at_least(side: ComparedStart, version: str) -> bool | None:
    """Return whether the start is of that vLLM or a later one, None for another engine or an unknown version."""
    from packaging.version import InvalidVersion, Version

    own = side.version
    if side.start.framework != "vllm" or own is None:
        return None
    try:
        return Version(Version(own).base_version) >= Version(version)
    except InvalidVersion:
        return None
