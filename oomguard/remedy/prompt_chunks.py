"""How many tokens of a prompt to process at a time: by a trace of the call in chunks, else fewer and fewer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from oomguard.facts import format_gib
from oomguard.remedy.solution import Solution
from oomguard.remedy.variant import Variant

CHUNK: Final = "prefill_chunk_size"
SMALLEST_TOKENS: Final = 32
# Where nothing tells what a chunk needs, the share of a prompt that is tried first, and of a chunk that failed.
_UNTRACED_SHARE: Final = 4


def chunk_that_fits(chunks: Variant, rows: int, room_bytes: float | None) -> Solution:
    """Return the largest chunk that fits in ``room_bytes``; where no trace tells, one that is a quarter."""
    need = None
    for tokens in _sizes(chunks):
        need = None if room_bytes is None else chunks.need_bytes(tokens, rows, round(room_bytes))
        if need is None or room_bytes is None:
            return _untraced(chunks)
        if need <= room_bytes:
            reason = f"chunks of {tokens} tokens peak at {format_gib(need)}, traced, of {format_gib(room_bytes)}"
            return Solution(tokens, reason)
    if need is None:
        return Solution(None, f"a prompt of {chunks.now} tokens is no longer than a chunk")
    return Solution(
        None, f"chunks of {SMALLEST_TOKENS} tokens need {format_gib(need)}, traced, of {format_gib(room_bytes or 0)}"
    )


def _sizes(chunks: Variant) -> Iterator[int]:
    """Yield smaller chunks, the largest first: powers of two."""
    tokens = 1 << max(0, (_tokens(chunks) - 1).bit_length() - 1)
    while tokens >= SMALLEST_TOKENS:
        yield tokens
        tokens //= 2


def _tokens(chunks: Variant) -> int:
    return chunks.now if isinstance(chunks.now, int) else 0


def _untraced(chunks: Variant) -> Solution:
    tokens = next((size for size in _sizes(chunks) if size * _UNTRACED_SHARE <= _tokens(chunks)), None)
    if tokens is None:
        return Solution(None, f"chunks of {chunks.now} tokens failed")
    return Solution(tokens, f"what a chunk needs is not known; {chunks.now} tokens at once failed")
