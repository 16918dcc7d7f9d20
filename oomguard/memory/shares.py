"""Who held how much of the device, by an allocator's figures, whatever wording printed them.

Old and new messages name other parts of the same picture (reserved in total, or reserved but unallocated; this
process, or a list of processes). Rules reason over the names here. An implausible figure is unknown, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from oomguard.facts import Fact, FactValue, number_of

# torch's context, its libraries and NCCL beside the allocator: what a process may hold beyond its tensors.
_BESIDE_TENSORS_BYTES: Final = 3 << 30


def add_shares(facts: dict[str, Fact]) -> None:
    """Add own, others', unused and tried shares of the device, as far as the printed figures tell."""

    def number(name: str) -> float | None:
        return number_of(facts, name)

    def solved(name: str, value: FactValue) -> None:
        facts.setdefault(name, Fact(name, value, "solved"))

    total, free, tried = number("device_total_bytes"), number("device_free_bytes"), number("tried_bytes")
    allocated = number("allocated_bytes")
    reserved, unused = _reserved(allocated, number("reserved_total_bytes"), number("reserved_unallocated_bytes"))
    in_use = number("process_in_use_bytes")
    if in_use is not None and not _plausible(in_use, total, allocated):
        in_use = None
    others = number("other_process_in_use_bytes")
    if _is_itself(facts, allocated if reserved is None else reserved, others):
        facts["process_in_use_bytes"] = replace(facts.pop("other_process_in_use_bytes"), name="process_in_use_bytes")
        in_use, others = others, None
    if in_use is not None and reserved is not None and number("allocated_bytes") is not None and in_use >= reserved:
        solved("non_torch_bytes", round(in_use - reserved))
    own = in_use
    if own is None and reserved is not None:
        own = others if others is not None and _fits_tensors(others, reserved) else reserved
    if unused is not None:
        solved("unused_bytes", round(unused))
    if _is_before_graphs(facts):
        solved("before_graphs", True)
    if own is not None:
        solved("own_bytes", round(own))
    if not total:
        return
    if tried is not None:
        solved("tried_ratio", tried / total)
    if unused is not None:
        solved("unused_ratio", unused / total)
    if own is None:
        return
    solved("own_ratio", own / total)
    if free is not None and own <= total:
        rest = max(0.0, total - free - own)
        solved("others_bytes", round(rest))
        solved("others_ratio", rest / total)


def _reserved(
    allocated: float | None, reserved: float | None, unused: float | None
) -> tuple[float | None, float | None]:
    """Return what the allocator holds, and what of it is in no tensor: each from the other where one is not printed."""
    if allocated is None:
        return reserved, unused
    if unused is None and reserved is not None and reserved >= allocated:
        unused = reserved - allocated
    if reserved is None and unused is not None:
        reserved = allocated + unused
    return reserved, unused


def _is_before_graphs(facts: Mapping[str, Fact]) -> bool:
    """Whether no graph was captured yet: torch since 2.3 names private pools beside its tensors where it has them."""
    eager = facts.get("enforce_eager")
    # Messages that name all that is reserved name no pools.
    is_named = "private_pool_bytes" in facts or "reserved_total_bytes" in facts
    return "allocated_bytes" in facts and not is_named and not (eager is not None and eager.value is True)


def _is_itself(facts: Mapping[str, Fact], reserved: float | None, others: float | None) -> bool:
    """Whether a listed process is the failed one: in a container it is listed by a number that is not its own."""
    if "process_in_use_bytes" in facts or others is None or reserved is None:
        return False
    return _fits_tensors(others, reserved)


def _fits_tensors(in_use: float, reserved: float) -> bool:
    return reserved <= in_use <= reserved + _BESIDE_TENSORS_BYTES


def _plausible(in_use: float, total: float | None, allocated: float | None) -> bool:
    """Whether "this process has N in use" can be true: in containers it may be 0, an underflow, or less than its own tensors."""
    if total is not None and in_use > 1.05 * total:
        return False
    return in_use > 0 and (allocated is None or in_use >= 0.98 * allocated)
