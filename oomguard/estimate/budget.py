"""Divide a device's bytes into disjoint parts that never exceed the device.

Printed numbers overlap. Weights and the private pools of CUDA graphs are tensors. Tensors are part
of the process's memory in use. The memory in use before the KV cache includes all of them. If
numbers contradict each other, the budget omits them, and ``Budget.conflict`` names them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final, NamedTuple

from oomguard.core.errors import SettingError
from oomguard.core.facts import Fact, FactValue, format_gib, number_of, parse_size
from oomguard.core.incident import Budget, BudgetPart, Incident

# Old and new messages print different parts of the same picture: reserved in total, reserved but
# unallocated, this process, or a list of processes. Rules use the names below. An implausible
# number is unknown, never zero.

# The memory of a process beyond its tensors: torch's context, its libraries and NCCL.
_BESIDE_TENSORS_BYTES: Final = 3 << 30
# The driver measures a process a little later than its allocator.
_ROUNDING_RATIO: Final = 0.005
_LISTED_PROCESS: Final = re.compile(
    r"\bProcess \d{1,10} has ([\d.]{1,12} [KMG]iB|\d{1,20} bytes) memory in use"
)


def add_shares(facts: dict[str, Fact], message: str = "") -> None:
    """Add this process's, others', unused and requested shares of the device to the facts.

    Args:
        facts: the known facts; the function adds to them.
        message: the allocator's message, which lists processes one by one.
    """

    def number(name: str) -> float | None:
        return number_of(facts, name)

    def solved(name: str, value: FactValue) -> None:
        facts.setdefault(name, Fact(name, value, "solved"))

    total = number("device_total_bytes")
    free = number("device_free_bytes")
    tried = number("tried_bytes")
    allocated = number("allocated_bytes")
    reserved, unused = _reserved(
        allocated, number("reserved_total_bytes"), number("reserved_unallocated_bytes")
    )
    in_use = number("process_in_use_bytes")
    if in_use is not None and not _plausible(in_use, total, allocated):
        in_use = None
    if in_use is None:
        in_use = _taken_off_the_list(facts, allocated if reserved is None else reserved, message)
    if (
        in_use is not None
        and reserved is not None
        and number("allocated_bytes") is not None
        and in_use >= reserved
    ):
        solved("non_torch_bytes", round(in_use - reserved))
    if in_use is None:
        own = reserved
    else:
        own = in_use
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
    """Return the allocator's reserved bytes and its unused bytes, deriving a missing one."""
    if allocated is None:
        return reserved, unused
    if unused is None and reserved is not None and reserved >= allocated:
        unused = reserved - allocated
    if reserved is None and unused is not None:
        reserved = allocated + unused
    return reserved, unused


def _is_before_graphs(facts: Mapping[str, Fact]) -> bool:
    """Return whether no CUDA graph was captured yet.

    torch since 2.3 reports private pools next to its tensors if there are any.
    """
    eager = facts.get("enforce_eager")
    # Messages with the total reservation do not report pools.
    is_named = "private_pool_bytes" in facts or "reserved_total_bytes" in facts
    return (
        "allocated_bytes" in facts
        and not is_named
        and not (eager is not None and eager.value is True)
    )


def _taken_off_the_list(
    facts: dict[str, Fact], reserved: float | None, message: str
) -> float | None:
    """Return the failed process's bytes from the message's process list.

    The function also removes that process from the other processes. In a container the list shows
    it under a foreign id. Without the removal the device would have too many bytes: all listed
    processes, the free memory, and again the failed process's tensors.
    """
    listed = facts.get("other_process_in_use_bytes")
    if listed is None or isinstance(listed.value, (str, bool)) or reserved is None:
        return None
    total = number_of(facts, "device_total_bytes")
    free = number_of(facts, "device_free_bytes")
    if total is None:
        most = None
    else:
        most = (1 + _ROUNDING_RATIO) * total
    if most is not None and listed.value > most:
        return None  # a list of another device
    sizes = _listed_bytes(message)
    if not sizes or abs(sum(sizes) - listed.value) > len(sizes):
        sizes = [int(listed.value)]
    # The process holds at least what it reserved, so smaller ones on the list are others.
    large = []
    for size in sizes:
        if size >= _OWN_COUNT_RATIO * reserved:
            large.append(size)
    own = min(large, default=None)
    is_too_much = most is not None and listed.value + reserved + (free or 0) > most
    if own is None or not (is_too_much or _fits_tensors(own, reserved)):
        return None
    facts.setdefault(
        "process_in_use_bytes", replace(listed, name="process_in_use_bytes", value=own)
    )
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
    """Return whether the printed bytes of this process can be true.

    In containers the driver may report 0, an underflow, or less than the process's own tensors.
    """
    if total is not None and in_use > 1.05 * total:
        return False
    return in_use > 0 and (allocated is None or in_use >= _OWN_COUNT_RATIO * allocated)


# An allocator or a refused start prints the free memory of the failure. For these kinds it is the
# free memory at the engine's start.
_FREE_AT_START: Final = frozenset(
    {
        "kv_cache_none_left",
        "kv_cache_too_small_for_max_len",
        "mamba_cache_blocks",
        "encoder_budget",
        "kv_slots_exhausted",
        "memory_profiling_changed",
        "engine_dead",
    }
)
# The driver measures a process a little later than its allocator, and others allocate meanwhile.
_TOLERANCE_RATIO: Final = 0.001
# If the driver reports this much less than the process's tensors, it does not see the process: in a
# container, or on Windows.
_OWN_COUNT_RATIO: Final = 0.98
# Up to this share of the device, memory that is neither free nor this process's may be its own
# context.
_OTHERS_RATIO: Final = 0.2
# Weights measured by the driver are a little larger than their tensors.
_WEIGHTS_ROUNDING_RATIO: Final = 0.05


class _Share(NamedTuple):
    """Describe one owner's share: its name in a sentence, its bytes with rounding, its parts."""

    words: str
    bytes: int
    slack: float
    parts: tuple[BudgetPart, ...]


class _Figures:
    """Read the byte figures of a failure or a start: whole bytes, None for an unknown one."""

    def __init__(self, facts: Mapping[str, Fact]) -> None:
        self._facts = facts

    def __call__(self, name: str) -> int | None:
        value = number_of(self._facts, name)
        if value is None:
            return None
        return int(value)

    def slack(self, *names: str) -> float:
        total = 0.0
        for name in names:
            if name in self._facts:
                total += self._facts[name].slack
        return total

    def line(self, name: str) -> int | None:
        fact = self._facts.get(name)
        if fact:
            return fact.line
        return None

    def part(self, label: str, name: str, size: int | None = None) -> BudgetPart:
        """Return a budget part for a fact; ``size`` overrides its bytes if parts overlap."""
        own = self(name) or 0
        if size is None:
            size = own
        if name in self._facts and size == own:
            source = self._facts[name].source
        else:
            source = "solved"
        return BudgetPart(label, size, source)


def budget_of_failure(incident: Incident, facts: Mapping[str, Fact]) -> Budget:
    """Divide the device's bytes at a failure; ``facts`` are all known facts."""
    figures = _Figures(facts)
    kind = incident.kind
    total = figures("device_total_bytes")
    if kind == "host_oom":
        return Budget()  # the host ran out of memory
    conflicts = list(_impossible(figures, total))
    shares: list[_Share] = []
    before = figures("used_before_start_bytes")
    free = figures("device_free_bytes")
    if (
        before is None
        and kind in _FREE_AT_START
        and total is not None
        and free is not None
        and free < total
    ):
        before = total - free
    if before is not None:
        part = BudgetPart("in use at the start", before, "solved")
        shares.append(
            _Share("in use at the start", before, figures.slack("device_free_bytes"), (part,))
        )
    if figures("used_before_start_bytes") is None:  # otherwise the engine has loaded nothing yet
        shares += _of_process(figures, total, "torch" if kind == "mps_oom" else "tensors")
        shares += _of_others(figures, total)
    if (
        free is not None
        and kind not in _FREE_AT_START
        and figures.line("device_free_bytes")
        in {
            None,
            incident.location.line,
        }
    ):
        part = figures.part("free", "device_free_bytes")
        shares.append(_Share("free", free, figures.slack("device_free_bytes"), (part,)))
    return _disjoint(total, shares, figures.slack("device_total_bytes"), conflicts)


def _impossible(figures: _Figures, total: int | None) -> Iterator[str]:
    """Yield contradictions within this process's own numbers.

    Examples: tensors above the device size (Windows), or a process count that cannot be true.
    """
    in_use = figures("process_in_use_bytes")
    allocated = figures("allocated_bytes")
    tolerance = figures.slack("process_in_use_bytes", "device_total_bytes", "allocated_bytes")
    if total and total > 0:
        most = total * (1 + _TOLERANCE_RATIO) + tolerance
    else:
        most = None
    if allocated is not None and most is not None and allocated > most:
        yield f"{format_gib(allocated)} in tensors, but the device has {format_gib(total or 0)}"
    if in_use is not None and most is not None and in_use > most:
        yield (
            f"{format_gib(in_use)} in use by this process, but the device has "
            f"{format_gib(total or 0)}"
        )
    elif (
        in_use is not None
        and allocated is not None
        and in_use < _OWN_COUNT_RATIO * allocated - tolerance
    ):
        yield (
            f"{format_gib(in_use)} in use by this process, but {format_gib(allocated)} in its "
            "tensors"
        )


def _of_process(
    figures: _Figures, total: int | None, allocated_words: str = "tensors"
) -> Iterator[_Share]:
    """Yield the shares of the failed process, or of the engine before its KV cache.

    MPS counts unused blocks as allocated.
    """
    names = ("allocated_bytes", "unused_bytes", "non_torch_bytes", "process_in_use_bytes")
    allocated = figures("allocated_bytes")
    own = figures("own_bytes")
    if (
        total
        and total > 0
        and allocated is not None
        and allocated > total + figures.slack("allocated_bytes")
    ):
        return
    if allocated is not None:
        parts = list(_of_allocator(figures, own, allocated_words))
    elif own is not None:
        parts = list(
            _besides(figures, "own_bytes", "this process", {"model_weights_bytes": "the weights"})
        )
    else:
        names = (
            "model_weights_bytes",
            "peak_activation_bytes",
            "non_torch_bytes",
            "consumed_bytes",
        )
        parts = list(_before_kv_cache(figures, total))
    parts = _above_zero(parts)
    if parts:
        size = sum(part.bytes for part in parts)
        yield _Share("held by this process", size, figures.slack(*names), tuple(parts))


def _of_allocator(figures: _Figures, own: int | None, words: str) -> Iterator[BudgetPart]:
    allocated = figures("allocated_bytes") or 0
    unused = figures("unused_bytes") or 0
    pools = {"model_weights_bytes": "the weights", "private_pool_bytes": "the private pools"}
    yield from _besides(figures, "allocated_bytes", words, pools)
    if unused > 0:
        name = "reserved_unallocated_bytes"
        yield figures.part("reserved by torch, unused", name, unused)
    if own is not None and own > allocated + unused:
        if figures("unused_bytes") is not None:
            name = "non-torch"
        else:
            name = "besides the tensors"
        yield BudgetPart(name, own - allocated - unused, "solved")
    else:
        yield figures.part("non-torch", "non_torch_bytes")


def _besides(
    figures: _Figures, name: str, label: str, inside: Mapping[str, str]
) -> Iterator[BudgetPart]:
    """Yield a figure's parts: the ones inside it, and the rest."""
    rest = figures(name) or 0
    named = []
    whole = rest
    for fact, words in inside.items():
        size = figures(fact)
        if (
            size is None
            or size <= 0
            or size > rest + figures.slack(fact, name) + _WEIGHTS_ROUNDING_RATIO * whole
        ):
            continue  # from another process or an earlier start
        size = min(size, rest)
        yield figures.part(words.removeprefix("the "), fact, size)
        rest -= size
        named.append(words)
    yield figures.part(f"{label} besides {' and '.join(named)}" if named else label, name, rest)


def _before_kv_cache(figures: _Figures, total: int | None) -> Iterator[BudgetPart]:
    """Yield the engine's memory by its own measurement, without an allocator's numbers."""
    parts = [
        figures.part("weights", "model_weights_bytes"),
        figures.part("activations", "peak_activation_bytes"),
        figures.part("non-torch", "non_torch_bytes"),
    ]
    graphs = figures.part("CUDA graphs", "cudagraph_bytes")
    consumed = figures("consumed_bytes")
    yield from parts
    if consumed is None:
        yield graphs
        return
    # A number above the device size is what the engine would need, not what it uses.
    rest = consumed - sum(max(0, part.bytes) for part in parts)
    if total is not None and consumed > total:
        return
    if 0 < graphs.bytes <= rest + figures.slack("cudagraph_bytes", "consumed_bytes"):
        yield replace(graphs, bytes=min(graphs.bytes, rest))
        rest -= min(graphs.bytes, rest)
    yield BudgetPart("in use before the KV cache", rest, "solved")


def _of_others(figures: _Figures, total: int | None) -> Iterator[_Share]:
    listed = figures("other_process_in_use_bytes")
    rest = figures("others_bytes")
    slack = figures.slack("other_process_in_use_bytes")
    if listed is not None and listed > 0:
        yield _Share(
            "held by other processes",
            listed,
            slack,
            (figures.part("other processes", "other_process_in_use_bytes"),),
        )
    elif total and rest is not None and rest > _OTHERS_RATIO * total and listed is None:
        # Without the driver's number the process's own context is part of it.
        if figures("process_in_use_bytes") is not None:
            name = "other processes"
        else:
            name = "not shown as this process's"
        yield _Share(f"held by {name}", rest, slack, (BudgetPart(name, rest, "solved"),))


_START_PARTS: Final = (
    ("model_weights_bytes", "weights"),
    ("peak_activation_bytes", "activations"),
    ("cudagraph_bytes", "CUDA graphs"),
    ("kv_cache_available_bytes", "KV cache"),
    ("non_torch_bytes", "non-torch"),
)


def budget_of_start(facts: Mapping[str, Fact]) -> Budget:
    """Divide the device's bytes at an engine's start; the rest of the device is free."""
    figures = _Figures(facts)
    total = figures("device_total_bytes")
    before = figures("device_free_bytes")
    after = figures("current_free_bytes")
    consumed = figures("consumed_bytes")
    weights = figures("model_weights_bytes")
    parts = [figures.part(label, name) for name, label in _START_PARTS]
    if (
        consumed is not None
        and weights is not None
        and "non_torch_bytes" not in facts
        and consumed >= weights
    ):
        # 0.27 and later print the two together.
        parts[-1] = BudgetPart("non-torch", consumed - weights, "solved")
    parts = _above_zero(parts)
    slack = figures.slack(*(name for name, _ in _START_PARTS))
    own = sum(part.bytes for part in parts)
    if parts:
        shares = [_Share("taken by the engine", own, slack, tuple(parts))]
    else:
        shares = []
    if (
        total is not None and before is not None and total > before
    ):  # a start prints the free memory at its beginning
        taken = BudgetPart("in use at the start", total - before, "solved")
        shares.append(_Share("in use at the start", taken.bytes, 0.0, (taken,)))
    if after is not None:  # SGLang prints the free memory when it is ready
        part = figures.part("free", "current_free_bytes")
        shares.append(_Share("free", after, figures.slack("current_free_bytes"), (part,)))
    elif total is not None and {"weights", "KV cache"} <= {part.name for part in parts}:
        free = total - sum(share.bytes for share in shares)
        if free > 0:
            shares.append(_Share("free", free, 0.0, (BudgetPart("free", free, "solved"),)))
    return _disjoint(total, shares, figures.slack("device_total_bytes"), [])


def _disjoint(
    total: int | None, shares: Iterable[_Share], slack: float, conflicts: list[str]
) -> Budget:
    """Return a budget of shares that can be true together; others become its conflict."""
    kept: list[_Share] = []
    for share in shares:
        if share.bytes > 0:
            kept.append(share)
    size = total or 0
    # A negative or zero total is unknown.
    while size > 0 and (wrong := _contradiction(size, kept, slack)):
        kept = _others(kept, wrong)
        sizes = [f"{format_gib(share.bytes)} {share.words}" for share in wrong]
        if len(wrong) > 1:
            sum_of = f", {format_gib(sum(share.bytes for share in wrong))} together"
        else:
            sum_of = ""
        conflicts.append(f"{_listed(sizes)}{sum_of}, but the device has {format_gib(size)}")
    parts = []
    for share in kept:
        parts += _above_zero(share.parts)
    if size > 0:
        parts = _within(size, parts)
    return Budget(total, tuple(parts), "; ".join(conflicts) or None)


def _above_zero(parts: Iterable[BudgetPart]) -> list[BudgetPart]:
    found = []
    for part in parts:
        if part.bytes > 0:
            found.append(part)
    return found


def _others(shares: Iterable[_Share], wrong: Collection[_Share]) -> list[_Share]:
    found = []
    for share in shares:
        if share not in wrong:
            found.append(share)
    return found


def _contradiction(total: int, shares: list[_Share], slack: float) -> list[_Share]:
    """Return the smallest set of shares that exceeds the device, the largest first.

    Returns an empty list if all shares fit.
    """
    ordered = sorted(shares, key=lambda share: share.bytes, reverse=True)
    for count in range(1, len(ordered) + 1):
        for group in combinations(ordered, count):
            tolerance = slack + sum(share.slack for share in group) + _TOLERANCE_RATIO * total
            if sum(share.bytes for share in group) > total + tolerance:
                return list(group)
    return []


def _within(total: int, parts: Sequence[BudgetPart]) -> list[BudgetPart]:
    """Reduce parts by the rounding with which printed numbers exceed the device.

    The largest solved part absorbs it, or else the largest part.
    """
    left = list(parts)
    excess = sum(part.bytes for part in left) - total
    while excess > 0:
        at = max(
            range(len(left)),
            key=lambda i: (left[i].source == "solved" and left[i].bytes > excess, left[i].bytes),
        )
        taken = min(excess, left[at].bytes)
        excess -= taken
        left[at] = replace(left[at], bytes=left[at].bytes - taken)
    return _above_zero(left)


def _listed(texts: list[str]) -> str:
    if len(texts) == 1:
        return texts[0]
    return f"{', '.join(texts[:-1])} and {texts[-1]}"
