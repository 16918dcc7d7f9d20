"""Who held how much of the device, by an allocator's figures, whatever wording printed them.

Old and new messages name other parts of the same picture (reserved in total, or reserved but unallocated; this
process, or a list of processes). Rules reason over the names here. An implausible figure is unknown, never zero.
"""

from __future__ import annotations

from typing import Final

from oomguard.facts import Fact, FactValue, number_of

# torch's context, its libraries and NCCL beside the allocator: what a process may hold beyond its tensors.
_BESIDE_TENSORS_BYTES: Final = 2 << 30


def add_shares(facts: dict[str, Fact]) -> None:
    """Add own, others', unused and tried shares of the device, as far as the printed figures tell."""

    def number(name: str) -> float | None:
        return number_of(facts, name)

    def solved(name: str, value: FactValue) -> None:
        facts.setdefault(name, Fact(name, value, "solved"))

    total, free, tried = number("device_total_bytes"), number("device_free_bytes"), number("tried_bytes")
    allocated, reserved = number("allocated_bytes"), number("reserved_total_bytes")
    unused = number("reserved_unallocated_bytes")
    if unused is None and reserved is not None and allocated is not None and reserved >= allocated:
        unused = reserved - allocated
    if reserved is None and allocated is not None and unused is not None:
        reserved = allocated + unused
    in_use = number("process_in_use_bytes")
    if in_use is not None and not _plausible(in_use, total, allocated):
        in_use = None
    if in_use is not None and reserved is not None and number("allocated_bytes") is not None and in_use >= reserved:
        solved("non_torch_bytes", round(in_use - reserved))
    others = number("other_process_in_use_bytes")
    own = in_use
    if own is None and reserved is not None:
        # In a container the process is listed by a number that is not its own: the one that fits its tensors is it.
        own = others if others is not None and reserved <= others <= reserved + _BESIDE_TENSORS_BYTES else reserved
    if unused is not None:
        solved("unused_bytes", round(unused))
    if own is not None:
        solved("own_bytes", round(own))
    if not total:
        return
    if tried is not None:
        solved("tried_ratio", tried / total)
    if unused is not None:
        solved("unused_ratio", unused / total)
    if own is not None:
        solved("own_ratio", own / total)
        if free is not None and own <= total:
            rest = max(0.0, total - free - own)
            solved("others_bytes", round(rest))
            solved("others_ratio", rest / total)


def _plausible(in_use: float, total: float | None, allocated: float | None) -> bool:
    """Whether "this process has N in use" can be true: in containers it may be 0, an underflow, or less than its own tensors."""
    if total is not None and in_use > 1.05 * total:
        return False
    return in_use > 0 and (allocated is None or in_use >= 0.98 * allocated)
