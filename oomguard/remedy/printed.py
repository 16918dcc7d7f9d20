"""Values from printed numbers: the solvers that rule files name. Each solves one setting or names the fact it lacks.

The engine's own printed numbers come first. Solvers take every figure on the unfavourable side of its rounding; every
margin stands here with its reason. The first paragraph of a solver's docstring is printed on the pages of the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from oomguard.facts import MIB, format_gib
from oomguard.incident import Incident
from oomguard.memory.ceilings import most_free_ratio, others_margin_ratio, pool_margin_bytes
from oomguard.remedy.missing_facts import not_shown
from oomguard.remedy.solution import Solution

# Raising the utilization: what the engine holds varies a little from start to start; on the CPU backend the node's
# total itself moves by the minute, so the margin there is larger.
RAISE_MARGIN_RATIO: Final = 0.01
RAISE_MARGIN_CPU_RATIO: Final = 0.02
RAISE_MARGIN_BYTES: Final = 32 * MIB
# Where the KV need of one request is not known: up to this share of the device, as far as it is free.
UNKNOWN_KV_RATIO: Final = 0.10
# Of the sequences of a warm-up that ran out of memory, so many times fewer are tried.
WARMUP_DIVISOR: Final = 4
# Whole blocks of the largest default size: where it is not known how many tokens a block holds.
LARGEST_BLOCK_TOKENS: Final = 128

Solver = Callable[[Incident], Solution]


def printed_estimate(incident: Incident) -> Solution:
    """Take ``max_model_len`` from the engine's own estimate, else from capacity, else in proportion to what is left."""
    length, needed, left = (
        incident.number(n) for n in ("max_model_len_tokens", "kv_cache_needed_bytes", "kv_cache_available_bytes")
    )
    estimate = incident.number("estimated_max_model_len_tokens")
    capacity = incident.number("kv_cache_capacity_tokens")
    if length is None:
        return Solution(None, "max_model_len: not printed", unknown=("max_model_len: not printed",))
    if estimate is not None:
        value, why = int(estimate), "the engine's own estimate"
    elif capacity is not None:
        value, why = int(capacity), "the KV cache holds that many tokens"
    elif _above_zero(needed, incident.slack("kv_cache_needed_bytes")) and _above_zero(
        left, -incident.slack("kv_cache_available_bytes")
    ):
        assert needed is not None and left is not None  # noqa: S101, PT018 - just asked
        share = (left - incident.slack("kv_cache_available_bytes")) / (needed + incident.slack("kv_cache_needed_bytes"))
        tokens = LARGEST_BLOCK_TOKENS  # one block less for the null block
        value, why = (
            max(0, int(length * share) // tokens * tokens - tokens),
            "in proportion to the KV memory that is left",
        )
    else:
        missing = "the KV memory that is needed or left rounds to 0 and no estimate is printed"
        return Solution(None, missing, unknown=(missing,))
    if value <= 0:
        return Solution(None, "not one block of tokens fits in the KV memory that is left")
    if value >= length:
        return Solution(None, f"{why}: {value} tokens fit, {int(length)} were asked for")
    freed = round(needed * (1 - value / length)) if needed is not None else None
    reason = f"{why}: one request of {value} tokens fits, {int(length)} does not"
    image = incident.number("image_tokens") or 0
    blocked = f"one image takes {int(image)} tokens: prompts with one would be refused" if value <= image else None
    return Solution(value, reason, freed, predicts={"kv_cache_capacity_tokens": value}, blocked_by=blocked)


def _above_zero(value: float | None, slack: float) -> bool:
    """Return whether a printed figure is above zero on the given side of its rounding."""
    return value is not None and value + slack > 0


def kv_bytes_for_max_len(incident: Incident) -> Solution:
    """Set ``kv_cache_memory_bytes`` to hold one request of the full length: in whole blocks where the model's layout is known.

    KV need grows at most in proportion to the blocks of the length, so ``given * length / estimate`` with ``length`` in
    whole blocks is enough where the engine printed that ``estimate`` tokens fit in ``given`` bytes. The printed need's
    upper edge and the engine's own block are enough too: take the smaller.
    """
    ignored = incident.number("ignored_kv_cache_bytes")
    if ignored is not None:
        return Solution(None, f"{format_gib(ignored)} was set and has no effect: something sets another size over it")
    blocks, block_bytes = incident.number("kv_cache_needed_blocks"), incident.number("kv_cache_block_bytes")
    if blocks and block_bytes:
        size, each = int(blocks * block_bytes), format_gib(block_bytes)
        return Solution(size, f"holds one request of the full length: {int(blocks)} blocks of {each}")
    needed, given = incident.number("kv_cache_needed_bytes"), incident.number("kv_cache_memory_bytes")
    length, estimate = incident.number("max_model_len_tokens"), incident.number("estimated_max_model_len_tokens")
    own_blocks = math.ceil((length or 0) / LARGEST_BLOCK_TOKENS)
    bounds = []
    if needed is not None:
        own_block_ratio = max(0.01, 1 / own_blocks if own_blocks else 0.0)
        bounds.append(math.ceil((needed + incident.slack("kv_cache_needed_bytes")) * (1 + own_block_ratio)))
    if given and own_blocks and estimate:
        bounds.append(math.ceil(given * own_blocks * LARGEST_BLOCK_TOKENS / estimate))
    if not bounds:
        return Solution(None, "the KV need is not printed", unknown=("KV need: not printed",))
    return Solution(min(bounds), f"holds one request of {int(length or 0)} tokens")


def blocks_for_max_len(incident: Incident) -> Solution:
    """Raise ``num_gpu_blocks_override`` to the blocks of one request of the full length, where the memory holds them."""
    given, fitting = incident.number("num_gpu_blocks_override"), incident.number("kv_cache_fitting_blocks")
    length, estimate = incident.number("max_model_len_tokens"), incident.number("estimated_max_model_len_tokens")
    needed = incident.number("kv_cache_needed_blocks")
    if needed is None and given and length and estimate:
        needed = math.ceil((given - 1) * length / estimate) + 1  # one block is the engine's own
    if needed is None:
        return Solution(
            None, "the blocks of one request are not known", unknown=("KV blocks of one request: not known",)
        )
    what = (
        f"one request of {'the full length' if length is None else f'{int(length)} tokens'} takes {int(needed)} blocks"
    )
    if fitting is None:
        blocked = "not known: how many blocks the memory holds"
        return Solution(int(needed), what, unknown=("KV blocks that fit: not printed",), blocked_by=blocked)
    if needed > fitting:
        return Solution(None, f"{what}, and the memory holds {int(fitting)}")
    return Solution(int(needed), f"{what}, of {int(fitting)} that the memory holds")


def utilization_for_max_len(incident: Incident) -> Solution:
    """Raise the utilization by what one request lacks: (needed - available) / total."""
    needed, left = incident.number("kv_cache_needed_bytes"), incident.number("kv_cache_available_bytes")
    if needed is None or left is None:
        return Solution(None, "the KV need is not printed", unknown=("KV need: not printed",))
    missing = needed - left + incident.slack("kv_cache_needed_bytes") + incident.slack("kv_cache_available_bytes")
    return _raise_by(
        incident, missing, f"one request of max_model_len tokens lacks {format_gib(missing)}", bare_bytes=missing
    )


def utilization_for_kv_cache(incident: Incident) -> Solution:
    """Raise the utilization until weights, profile peak and one request fit: (consumed + need + margin) / total."""
    left = incident.number("kv_cache_available_bytes")
    if left is None:
        return Solution(None, "how much is missing is not printed", unknown=("available KV cache memory: not printed",))
    needed, length = incident.number("kv_cache_needed_bytes"), incident.number("max_model_len_tokens")
    total = incident.number("device_total_bytes")
    need = wish = 0.0
    if needed is not None:
        need = needed + incident.slack("kv_cache_needed_bytes")
        tokens = "max_model_len" if length is None else f"{int(length)}"
        what = f", one request of {tokens} tokens needs {format_gib(need)}"
    else:
        wish = (total or 0.0) * UNKNOWN_KV_RATIO
        what = "; one request's need is not known, so up to a tenth of the device is taken"
    deficit = -left + incident.slack("kv_cache_available_bytes") + incident.slack("desired_bytes")
    return _raise_by(
        incident, deficit + need, f"the KV cache lacks {format_gib(-left)}{what}", bare_bytes=-left, wish_bytes=wish
    )


def _raise_by(
    incident: Incident, missing_bytes: float, what: str, *, bare_bytes: float, wish_bytes: float = 0.0
) -> Solution:
    """Return the utilization that adds ``missing_bytes`` and a margin, and ``wish_bytes`` more as far as they are free."""
    total, ratio = incident.number("device_total_bytes"), incident.number("gpu_memory_utilization_ratio")
    free = incident.number("device_free_bytes")
    smallest = incident.number("smallest_helpful_device_bytes")
    below = f"; no utilization up to 1.0 helps on a card below {format_gib(smallest)}" if smallest else ""
    if not total:
        reason = f"would have to rise by {format_gib(bare_bytes)} / device total, which is not printed{below}"
        return Solution(None, reason, unknown=("device total: not printed",))
    desired = incident.number("desired_bytes")
    if ratio is None and desired is None:
        rise = f"{format_gib(bare_bytes)} / {format_gib(total)} = {bare_bytes / total:.2f}"
        reason = f"would have to rise by {rise} from a value that is not printed{below}"
        return Solution(None, reason, unknown=("gpu_memory_utilization: not printed",))
    before = ratio * total if ratio is not None else float(desired or 0)
    margin_ratio = RAISE_MARGIN_CPU_RATIO if incident.facts.get("on_cpu") else RAISE_MARGIN_RATIO
    margin = max(RAISE_MARGIN_BYTES, margin_ratio * (before + missing_bytes))
    sure_total = total - incident.slack("device_total_bytes")
    value = rounded(math.ceil, (before + missing_bytes + margin) / sure_total)
    ceiling = most_free_ratio() if free is None else min(most_free_ratio(), free / total)
    if wish_bytes:
        wished = rounded(math.floor, min(ceiling, (before + missing_bytes + margin + wish_bytes) / sure_total))
        value = max(value, wished)
    if value <= 0:
        return Solution(None, "nothing lacks by these figures")
    if value > ceiling:
        reached = (before + bare_bytes) / total
        limit = below.removeprefix("; ") or f"only {ceiling:.2f} of the device is free"
        if reached > 1 and not below:
            limit = "no utilization up to 1.0 helps"
        reason = (
            f"would have to rise by {format_gib(bare_bytes)} / {format_gib(total)} = {bare_bytes / total:.2f}, "
            f"to {reached:.2f} before any KV cache; {limit}"
        )
        return Solution(None, reason)
    # On the device's side nothing is freed: the engine may use more, and all of it becomes KV cache.
    left = incident.number("kv_cache_available_bytes")
    predicts = {} if left is None else {"kv_cache_available_bytes": value * total - before + left}
    return Solution(value, f"{what}; margin {format_gib(margin)}", predicts=predicts)


def rounded(direction: Callable[[float], int], ratio: float) -> float:
    """Return a utilization in thousandths: a hundredth of a large device is more than a gigabyte."""
    nudge = -1e-9 if direction is math.ceil else 1e-9
    return direction(1000 * ratio + nudge) / 1000


def utilization_within_free(incident: Incident) -> Solution:
    """Lower the utilization to what is free: (free - margin) / total."""
    free, total = incident.number("device_free_bytes"), incident.number("device_total_bytes")
    if free is None or not total:
        return Solution(None, "free and total memory are not printed", unknown=("free memory: not printed",))
    margin = others_margin_ratio() * total
    free_sure = free - incident.slack("device_free_bytes") - margin
    value = rounded(math.floor, free_sure / (total + incident.slack("device_total_bytes")))
    if value <= 0:
        return Solution(None, f"only {format_gib(free)} of {format_gib(total)} is free")
    ratio, desired = incident.number("gpu_memory_utilization_ratio"), incident.number("desired_bytes")
    if ratio is not None and value >= ratio:
        return Solution(
            None, f"{format_gib(free)} of {format_gib(total)} is free, more than utilization {ratio} asks for"
        )
    freed = round(desired - value * total) if desired is not None else None
    reason = f"{format_gib(free)} of {format_gib(total)} is free; margin {format_gib(free - value * total)}"
    return Solution(value, reason, freed, predicts={"desired_bytes": value * total})


def kv_bytes_within_free(incident: Incident) -> Solution:
    """Lower ``kv_cache_memory_bytes`` to what is free."""
    free, asked = incident.number("device_free_bytes"), incident.number("kv_cache_requested_bytes")
    if free is None or asked is None:
        return Solution(None, "free memory is not printed", unknown=("free memory: not printed",))
    on_host, total = "on_cpu" in incident.facts, incident.number("device_total_bytes") or free
    value = int(free - incident.slack("device_free_bytes") - pool_margin_bytes(total, is_on_host=on_host))
    if value <= 0:
        return Solution(None, f"only {format_gib(free)} is free")
    if value >= asked:
        return Solution(None, f"{format_gib(free)} is free, {format_gib(asked)} was asked for")
    return Solution(value, f"{format_gib(free)} is free, {format_gib(asked)} was asked for", round(asked - value))


def rows_that_fit(incident: Incident) -> Solution:
    """Run as many rows at a time as fit: by a trace of the call, else few enough first that what they take can be measured.

    No log prints what a row needs: the model behind a failed call solves this, and here is what is missing without one.
    """
    needed = ("batch_size", "row_bytes", "baseline_bytes", "device_total_bytes")
    missing = [name for name in needed if name not in incident.facts]
    why = not_shown(missing) if missing else "what a row takes is not known"
    return Solution(None, why, unknown=tuple(f"{n}: not measured" for n in missing))


def sequences_for_warmup(incident: Incident) -> Solution:
    """Lower ``max_num_seqs`` to a quarter: the warm-up's buffers grow in proportion to it.

    A quarter frees three quarters of the warm-up's memory. If the log prints how much was missing, the share of the device
    is solved instead.
    """
    figures = ("tried_bytes", "device_free_bytes", "device_total_bytes", "gpu_memory_utilization_ratio")
    if all(name in incident.facts for name in figures):
        return Solution(None, "shrinks the buffers of the warm-up")
    sequences = incident.number("max_num_seqs")
    if sequences is None:
        return Solution(None, "the text does not show max_num_seqs", unknown=("max_num_seqs: not printed",))
    value = int(sequences) // WARMUP_DIVISOR
    if value < 1:
        return Solution(None, f"{int(sequences)} sequences are too few to lower")
    reason = f"the warm-up with {int(sequences)} sequences needs memory in proportion to them; a quarter frees three quarters of it"
    return Solution(value, reason)


PRINTED: Final[dict[str, Solver]] = {
    "printed_estimate": printed_estimate,
    "blocks_for_max_len": blocks_for_max_len,
    "kv_bytes_for_max_len": kv_bytes_for_max_len,
    "utilization_for_max_len": utilization_for_max_len,
    "utilization_for_kv_cache": utilization_for_kv_cache,
    "utilization_within_free": utilization_within_free,
    "kv_bytes_within_free": kv_bytes_within_free,
    "rows_that_fit": rows_that_fit,
    "sequences_for_warmup": sequences_for_warmup,
}
