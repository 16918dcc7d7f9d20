"""Who held how much of the device, by an allocator's figures, whatever wording printed them.

Old and new messages name other parts of the same picture (reserved in total, or reserved but unallocated; this
process, or a list of processes). Rules reason over the names here. An implausible figure is unknown, never zero.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from oomguard.errors import SettingError
from oomguard.facts import Fact, FactValue, number_of, parse_size

# torch's context, its libraries and NCCL beside the allocator: what a process may hold beyond its tensors.
_BESIDE_TENSORS_BYTES: Final = 3 << 30
# The driver counts a process a little later than its allocator.
_OWN_COUNT_RATIO: Final = 0.98
_ROUNDING_RATIO: Final = 0.005
_LISTED_PROCESS: Final = re.compile(r"\bProcess \d{1,10} has ([\d.]{1,12} [KMG]iB|\d{1,20} bytes) memory in use")


def add_shares(facts: dict[str, Fact], message: str = "") -> None:
    """Add own, others', unused and tried shares of the device, as far as the printed figures tell.

    Args:
        facts: what is known; those that follow are added.
        message: the allocator's, which lists processes one by one.
    """

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
    if in_use is None:
        in_use = _taken_off_the_list(facts, allocated if reserved is None else reserved, message)
    if in_use is not None and reserved is not None and number("allocated_bytes") is not None and in_use >= reserved:
        solved("non_torch_bytes", round(in_use - reserved))
    own = reserved if in_use is None else in_use
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


def _taken_off_the_list(facts: dict[str, Fact], reserved: float | None, message: str) -> float | None:
    """Return what the failed process has in use if the message lists it by number, and take it off the other processes.

    In a container it is listed by a number that is not its own. Without it the device would hold more than it can: what all
    listed processes have in use, what is free, and once more the failed process's tensors.
    """
    listed = facts.get("other_process_in_use_bytes")
    if listed is None or isinstance(listed.value, (str, bool)) or reserved is None:
        return None
    total, free = number_of(facts, "device_total_bytes"), number_of(facts, "device_free_bytes")
    most = None if total is None else (1 + _ROUNDING_RATIO) * total
    if most is not None and listed.value > most:
        return None  # not a list of this device
    sizes = _listed_bytes(message)
    if not sizes or abs(sum(sizes) - listed.value) > len(sizes):
        sizes = [int(listed.value)]
    own = min((size for size in sizes if size >= _OWN_COUNT_RATIO * reserved), default=None)
    is_too_much = most is not None and listed.value + reserved + (free or 0) > most
    if own is None or not (is_too_much or _fits_tensors(own, reserved)):
        return None
    facts.setdefault("process_in_use_bytes", replace(listed, name="process_in_use_bytes", value=own))
    if listed.value > own:
        facts["other_process_in_use_bytes"] = replace(listed, value=int(listed.value) - own)
    else:
        del facts["other_process_in_use_bytes"]
    return own


def _listed_bytes(message: str) -> list[int]:
    try:
        return [parse_size(found.group(1)).bytes for found in _LISTED_PROCESS.finditer(message)]
    except SettingError:
        return []


def _fits_tensors(in_use: float, reserved: float) -> bool:
    return reserved <= in_use <= reserved + _BESIDE_TENSORS_BYTES


def _plausible(in_use: float, total: float | None, allocated: float | None) -> bool:
    """Whether "this process has N in use" can be true: in containers it may be 0, an underflow, or less than its own tensors."""
    if total is not None and in_use > 1.05 * total:
        return False
    return in_use > 0 and (allocated is None or in_use >= _OWN_COUNT_RATIO * allocated)
