"""How many tokens of a prompt to process at a time: by a trace of the call in chunks, else fewer and fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from oomguard.facts import format_gib
from oomguard.remedy.solution import Solution

SMALLEST_TOKENS: Final = 32
# Where nothing tells what a chunk needs, the share of a prompt that is tried first, and of a chunk that failed.
_UNTRACED_SHARE: Final = 4


@dataclass(frozen=True, slots=True)
class Chunks:
    """A prompt that may be processed in chunks.

    Attributes:
        tokens: tokens that are processed at once now.
        need_bytes: returns what all rows need with chunks of some tokens, by room; None where that cannot be told.
        why_not: why the prompt cannot be processed in chunks; None where it can.
    """

    tokens: int
    need_bytes: Callable[[int, int], int | None]
    why_not: str | None = None

    def sizes(self) -> Iterator[int]:
        """Yield smaller chunks, the largest first: powers of two."""
        tokens = 1 << max(0, (self.tokens - 1).bit_length() - 1)
        while tokens >= SMALLEST_TOKENS:
            yield tokens
            tokens //= 2


def chunk_that_fits(chunks: Chunks, room_bytes: float | None) -> Solution:
    """Return the largest chunk that fits in ``room_bytes``; where no trace tells, one that is a quarter."""
    if chunks.why_not is not None:
        return Solution(None, chunks.why_not)
    need = None
    for tokens in chunks.sizes():
        need = None if room_bytes is None else chunks.need_bytes(tokens, round(room_bytes))
        if need is None or room_bytes is None:
            return _untraced(chunks)
        if need <= room_bytes:
            reason = f"chunks of {tokens} tokens peak at {format_gib(need)}, traced, of {format_gib(room_bytes)}"
            return Solution(tokens, reason)
    if need is None:
        return Solution(None, f"a prompt of {chunks.tokens} tokens is no longer than a chunk")
    return Solution(
        None, f"chunks of {SMALLEST_TOKENS} tokens need {format_gib(need)}, traced, of {format_gib(room_bytes or 0)}"
    )


def _untraced(chunks: Chunks) -> Solution:
    tokens = next((size for size in chunks.sizes() if size * _UNTRACED_SHARE <= chunks.tokens), None)
    if tokens is None:
        return Solution(None, f"chunks of {chunks.tokens} tokens failed")
    return Solution(tokens, f"what a chunk needs is not known; {chunks.tokens} tokens at once failed")
