"""Solve a failed call by running it in another way, if fewer rows do not help.

The order is attention without scores, prefill in chunks, KV cache on the host. With permission
come a quantized KV cache, fewer new tokens, and a shorter prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from oomguard.core.facts import FactValue, format_gib
from oomguard.remedy.solution import Solution

CHUNK: Final = "prefill_chunk_size"
CACHE: Final = "cache_implementation"
# transformers' name for torch's attention, which keeps no score matrix.
WITHOUT_SCORES: Final = "sdpa"
SMALLEST_CHUNK_TOKENS: Final = 32
# The values of the cache setting, the least costly first.
CACHES: Final[tuple[FactValue, ...]] = ("offloaded", "offloaded_static", "quantized")
# The first chunk is at most this fraction of the prompt, and a later one of the failed chunk.
_CHUNK_SHARE: Final = 4
# If no formula gives the need, tokens are reduced at least to this ratio.
_FEWER_RATIO: Final = 0.9
# With fewer than one in so many tokens left, an answer or a prompt is useless.
_LEAST_SHARE: Final = 8


@dataclass(frozen=True, slots=True)
class Variant:
    """One setting of a failed call that can be changed.

    Attributes:
        now: its value in the failed call; None if it has none.
        why_not: returns why it cannot have a value; None if it can.
        row_bytes: returns the bytes of one row with a value, by a formula; None if unknown.
        is_changed: whether oomguard has already changed it.
    """

    now: FactValue | None
    why_not: Callable[[FactValue], str | None]
    row_bytes: Callable[[FactValue], int | None] = lambda _value: None
    is_changed: bool = False


def solve_variant(
    setting: str, variant: Variant, room_bytes: float | None, share: float
) -> Solution:
    """Return the value of a setting for the next attempt, or why there is none.

    Args:
        setting: the setting's name, a key of ``VARIED``.
        variant: what its values mean for the call.
        room_bytes: the bytes that the call may use; None if unknown.
        share: the room divided by what the call held when it failed, at most 1.
    """
    return VARIED[setting](variant, room_bytes, share)


def _without_scores(variant: Variant, room_bytes: float | None, share: float) -> Solution:
    del room_bytes, share
    why_not = variant.why_not(WITHOUT_SCORES)
    if why_not is not None:
        return Solution(None, why_not)
    return Solution(WITHOUT_SCORES, "this attention keeps no score matrix")


def _chunk(variant: Variant, room_bytes: float | None, share: float) -> Solution:
    del room_bytes
    if isinstance(variant.now, int):
        tokens = variant.now
    else:
        tokens = 0
    at_most = max(SMALLEST_CHUNK_TOKENS, int(tokens * min(share, 1 / _CHUNK_SHARE)))
    size = 1 << (at_most.bit_length() - 1)  # a power of two
    if size >= tokens:
        return Solution(
            None,
            f"{tokens} tokens at once failed, and oomguard uses no chunks below "
            f"{SMALLEST_CHUNK_TOKENS}",
        )
    why_not = variant.why_not(size)
    if why_not is None:
        return Solution(size, f"{tokens} tokens at once failed")
    return Solution(None, why_not)


def _cache(variant: Variant, room_bytes: float | None, share: float) -> Solution:
    del room_bytes, share
    reasons: list[str] = []
    for value in CACHES:
        if value == variant.now:
            continue
        why_not = variant.why_not(value)
        if why_not is None:
            return Solution(value, "the KV cache then uses less device memory")
        reasons.append(why_not)
    return Solution(None, "; ".join(dict.fromkeys(reasons)))


def _fewer_tokens(what: str) -> Callable[[Variant, float | None, float], Solution]:
    """Return a solver for the most tokens of a kind with which one row fits by a formula."""

    def solve(variant: Variant, room_bytes: float | None, share: float) -> Solution:
        if isinstance(variant.now, int):
            now = variant.now
        else:
            now = 0
        if now < 1:
            return Solution(None, f"the call has no {what} tokens")
        if room_bytes is None:
            return Solution(None, f"the need of fewer {what} tokens is not known")
        if variant.row_bytes(1) is None:
            tokens = int(now * min(share, _FEWER_RATIO))
            reason = f"{format_gib(room_bytes)} is {share:.0%} of what the row held when it failed"
        else:
            # A changed value has failed too, so the formula was not exact enough.
            if variant.is_changed:
                at_most = now // 2
            else:
                at_most = now - 1
            tokens = _most_tokens(
                at_most, lambda size: (variant.row_bytes(size) or 0) <= room_bytes
            )
            need = format_gib(variant.row_bytes(tokens) or 0)
            reason = f"a row with {tokens} {what} tokens needs {need} of {format_gib(room_bytes)}"
        if tokens * _LEAST_SHARE < now or tokens < 1:
            return Solution(
                None,
                f"only {max(0, tokens)} of {now} {what} tokens fit in {format_gib(room_bytes)}",
            )
        why_not = variant.why_not(tokens)
        if why_not is None:
            return Solution(tokens, reason)
        return Solution(None, why_not)

    return solve


def _most_tokens(at_most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to ``at_most`` that fits, 0 if none does."""
    low = 0
    high = at_most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


# By setting, the least costly first.
VARIED: Final[Mapping[str, Callable[[Variant, float | None, float], Solution]]] = {
    "attn_implementation": _without_scores,
    CHUNK: _chunk,
    CACHE: _cache,
    "max_new_tokens": _fewer_tokens("new"),
    "truncate_prompt_tokens": _fewer_tokens("prompt"),
}
