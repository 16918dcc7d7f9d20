"""What a watch saw in words: a call, an attempt, a size."""

from __future__ import annotations

from oomguard.facts import format_gib
from oomguard.timeline import MemoryUse, SeenCall, TimedAttempt

UNKNOWN = "-"


def size(size_bytes: int | None) -> str:
    """Return a size; a dash where it is unknown."""
    if size_bytes is None:
        return UNKNOWN
    return format_gib(size_bytes) if size_bytes else "0"


def peak(use: MemoryUse) -> str:
    """Return a peak, marked where it is the largest of samples."""
    return f"~{size(use.peak_bytes)}" if use.sampled and use.peak_bytes is not None else size(use.peak_bytes)


def name(row: SeenCall) -> str:
    """Return what a call is called, with its model."""
    return f"{row.model}.{row.what}" if row.model else row.what


def tokens(row: SeenCall) -> str:
    """Return the tokens of each row of a call: of its prompt, and those that it may generate."""
    if row.prompt_tokens is None:
        return ""
    return f"{row.prompt_tokens:,}" if row.max_new_tokens is None else f"{row.prompt_tokens:,} + {row.max_new_tokens:,}"


def attempt_words(timed: TimedAttempt) -> str:
    """Return what an attempt ran with and what came of it."""
    attempt = timed.attempt
    settings = ", ".join(f"{key} {value}" for key, value in attempt.settings.items())
    return f"{settings} {'ran' if attempt.succeeded else 'failed'}".strip()


def attempts(row: SeenCall) -> str:
    """Return a call's attempts in one line, by their rows where nothing else was changed; nothing where it ran as it was made."""
    first = row.attempts[0].attempt if row.attempts else None
    if first is not None and len(row.attempts) == 1 and first.succeeded and first.settings == {"batch_size": row.rows}:
        return ""
    if all(set(timed.attempt.settings) == {"batch_size"} for timed in row.attempts):
        sizes = " -> ".join(str(timed.attempt.settings["batch_size"]) for timed in row.attempts)
        return sizes if not row.attempts or row.attempts[-1].attempt.succeeded else f"{sizes} failed"
    return ", ".join(map(attempt_words, row.attempts))
