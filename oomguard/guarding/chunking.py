"""A failed call with its prompt in chunks: whether it may be, and what it would need."""

from __future__ import annotations

from collections.abc import Mapping

from oomguard.engines.protocol import WatchedCall
from oomguard.facts import FactValue
from oomguard.guarding.frames import frames_of
from oomguard.incident import Patch
from oomguard.remedy.prompt_chunks import SMALLEST_TOKENS, Chunks

SETTING = "prefill_chunk_size"


def chunks_of(
    call: WatchedCall, error: BaseException | None, settings: Mapping[str, FactValue], rows: int, why_not: str | None
) -> Chunks | None:
    """Return the chunks that a call may be run in; None where it has no prompt of known length.

    Args:
        call: the call as it was made.
        error: its first failure.
        settings: those in force, with the chunk that failed.
        rows: rows that run at once.
        why_not: what has shown that it cannot be run so; None where nothing has.
    """
    if call.prompt_tokens is None:
        return None
    failed_in = functions_of(error)
    asked = why_not or call.in_chunks(SMALLEST_TOKENS, failed_in)

    def need_bytes(tokens: int, room_bytes: int) -> int | None:
        changed = call.in_chunks(tokens, failed_in)
        traced = None if isinstance(changed, str) else changed.traced()
        return None if traced is None else traced.need_bytes(rows, room_bytes)

    now = settings.get(SETTING)
    tokens = now if isinstance(now, int) else call.prompt_tokens
    return Chunks(tokens, need_bytes, asked if isinstance(asked, str) else None)


def functions_of(error: BaseException | None) -> frozenset[str]:
    """Return the names of the functions that a failure went through."""
    return frozenset() if error is None else frozenset(frame.f_code.co_name for frame in frames_of(error))


def tell_of(patch: Patch, kind: str | None, done: int) -> None:
    """Log what changes, and after how many rows."""
    from oomguard.log import get_logger

    if patch.setting == SETTING:
        get_logger().warning("processing the prompt in chunks", tokens=patch.new, kind=kind, done=done)
    else:
        get_logger().warning("splitting the batch", rows=f"{patch.old} -> {patch.new}", kind=kind, done=done)
