"""What makes a failed call fit where fewer rows do not: other attention, a prompt in chunks, its cache elsewhere, fewer tokens of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from oomguard.facts import format_gib
from oomguard.memory.generate.rows import largest_rows
from oomguard.remedy.cache_elsewhere import CACHE, cache_that_fits
from oomguard.remedy.prompt_chunks import CHUNK, chunk_that_fits
from oomguard.remedy.solution import Solution
from oomguard.remedy.variant import Variant

# Attention that keeps no matrix of scores, by the name that transformers has for torch's own.
WITHOUT_SCORES: Final = "sdpa"


def _without_scores(variant: Variant, rows: int, room_bytes: float | None) -> Solution:
    """Return attention without a matrix of scores, unless a trace tells that it does not fit either."""
    need = None if room_bytes is None else variant.need_bytes(WITHOUT_SCORES, rows, round(room_bytes))
    if need is None or room_bytes is None:
        return Solution(WITHOUT_SCORES, "what is left without the scores is not known")
    told = f"without the scores it peaks at {format_gib(need)}, traced, of {format_gib(room_bytes)}"
    return Solution(WITHOUT_SCORES if need <= room_bytes else None, told)


def _most_tokens(what: str) -> Callable[[Variant, int, float | None], Solution]:
    """Return what finds the most tokens of a kind with which a call fits in its room; none where no trace tells."""

    def most(variant: Variant, rows: int, room_bytes: float | None) -> Solution:
        room, asked = round(room_bytes or 0), variant.now if isinstance(variant.now, int) else 0
        before = int(variant.least) - 1
        found = (
            None
            if room_bytes is None
            else largest_rows(lambda more: variant.need_bytes(before + more, rows, room), room, asked - before)
        )
        if found is None:
            return Solution(None, f"what fewer {what} tokens need is not known")
        kept, need = before + found[0], found[1]
        if not found[0]:
            told = f"with {variant.least} {what} it peaks at {format_gib(need)}, traced, of {format_gib(room)}"
            return Solution(None, told)
        return Solution(kept, f"{kept} {what} tokens peak at {format_gib(need)}, traced, of {format_gib(room)}")

    return most


# By setting, the least costly first.
VARIED: Final[Mapping[str, Callable[[Variant, int, float | None], Solution]]] = {
    "attn_implementation": _without_scores,
    CHUNK: chunk_that_fits,
    CACHE: cache_that_fits,
    "max_new_tokens": _most_tokens("new"),
    "truncate_prompt_tokens": _most_tokens("prompt"),
}


def solved(setting: str, variant: Variant, rows: int, room_bytes: float | None) -> Solution:
    """Return the value of a setting with which ``rows`` rows fit in ``room_bytes``, or why there is none."""
    if variant.why_not is not None:
        return Solution(None, variant.why_not)
    return VARIED[setting](variant, rows, room_bytes)
