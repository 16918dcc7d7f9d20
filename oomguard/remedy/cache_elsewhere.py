"""A call's KV cache kept another way: on the host, which changes no output, or in fewer bits, which does."""

from __future__ import annotations

from typing import Final

from oomguard.facts import FactValue, format_gib
from oomguard.remedy.prompt_chunks import CHUNK, chunk_that_fits
from oomguard.remedy.solution import Solution
from oomguard.remedy.variant import Variant

CACHE: Final = "cache_implementation"
# The values that a call may be given, the least costly first, and what each of them does.
_ON_HOST: Final = ("offloaded", "offloaded_static")
QUANTIZED: Final = "quantized"
CACHES: Final[tuple[FactValue, ...]] = (*_ON_HOST, QUANTIZED)


def on_host(variant: Variant) -> FactValue | None:
    """Return the value that keeps the cache on the host, None where the call cannot have one."""
    return next((value for value in _ON_HOST if variant.why_not_value(value) is None), None)


def cache_that_fits(variant: Variant, rows: int, room_bytes: float | None) -> Solution:
    """Return the first cache with which a trace fits in ``room_bytes``; where none tells, one on the host."""
    told: list[str] = []
    for value in CACHES:
        why_not = variant.why_not_value(value)
        if why_not is not None:
            told.append(f"{value}: {why_not}")
            continue
        need = None if room_bytes is None else variant.need_bytes(value, rows, round(room_bytes))
        if need is None or room_bytes is None:
            if value != QUANTIZED:
                return Solution(value, "what is left with the cache on the host is not known")
            told.append(f"{value}: what it needs is not known")
            continue
        peak = f"with it {value} the call peaks at {format_gib(need)}, traced, of {format_gib(room_bytes)}"
        if need <= room_bytes:
            return Solution(value, peak)
        told.append(peak)
    return Solution(None, "; ".join(told[:1] if len(set(told)) == 1 else told))


def both(chunks: Variant, cache: Variant, room_bytes: int) -> list[tuple[str, FactValue, str]]:
    """Return a cache on the host and the prompt in chunks with which one row fits by a trace: settings, values, and why.

    Empty where one of the two is enough, or both are not.
    """
    value = on_host(cache)
    if value is None or chunks.beside is None or chunks.why_not is not None:
        return []
    together = chunks.beside(CACHE, value)
    need = cache.need_bytes(value, 1, room_bytes)
    is_enough = need is None or need <= room_bytes or chunk_that_fits(chunks, 1, room_bytes).value is not None
    if together.why_not is not None or is_enough:
        return []
    solution = chunk_that_fits(together, 1, room_bytes)
    if solution.value is None or together.need_bytes(solution.value, 1, room_bytes) is None:
        return []
    reason = f"with the cache on the host {solution.reason}"
    return [(CACHE, value, reason), (CHUNK, solution.value, reason)]
