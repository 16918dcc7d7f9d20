"""Compare two starts: their rows, what explains them, what stays unknown, and one sentence for all of it."""

from __future__ import annotations

from oomguard.comparing.comparison import ComparedStart, Comparison, Explanation, Row
from oomguard.comparing.explanations import different_engines, explain, not_explained
from oomguard.comparing.table import rows_of
from oomguard.facts import format_gib

# Failures that are about the size of the KV cache.
_OF_THE_POOL = frozenset({"kv_cache_none_left", "kv_cache_too_small_for_max_len", "cpu_node_memory"})
_OF_THE_BUDGET = frozenset({"weights", "activations", "non-torch", "CUDA graphs"})
# Rows that are named as missing if a log does not print them.
_NAMED = _OF_THE_BUDGET | {"KV cache", "device total"}


def compare(old: ComparedStart, new: ComparedStart) -> Comparison:
    """Return what changed from ``old`` to ``new``."""
    rows = rows_of(old, new)
    explanations = explain(old, new, rows)
    return Comparison(
        old, new, _headline(old, new, rows), rows, explanations, tuple(_unknown(old, new, rows, explanations))
    )


def _headline(old: ComparedStart, new: ComparedStart, rows: tuple[Row, ...]) -> str:
    changed = {row.name: row for row in rows if row.changed}
    what: list[str] = []
    if different_engines(old, new):
        what.append("different engines")
    else:
        what += _largest(changed)
        if new.incident is not None and old.incident is None and new.incident.kind in _OF_THE_POOL:
            what += _margin(old, new)
        elif what and new.incident is not None and old.outcome != new.outcome:
            what.append(f"NEW failed: {new.outcome}")
    if not changed and old.outcome == new.outcome:
        what = ["nothing changed in what the logs print"]
    elif not what:
        what = [_outcomes(old, new, len(changed))]
    return f"{_versions(old, new)}: {'; '.join(what)}"


def _versions(old: ComparedStart, new: ComparedStart) -> str:
    was, now = old.version, new.version
    if different_engines(old, new):
        return f"{old.start.framework}{f' {was}' if was else ''} -> {new.start.framework}{f' {now}' if now else ''}"
    if was is None and now is None:
        return "versions not printed"
    return f"{now}, both" if was == now else f"{was or 'version not printed'} -> {now or 'version not printed'}"


def _largest(changed: dict[str, Row]) -> list[str]:
    """Tell how the KV cache changed, or else the part of the budget that changed most."""
    parts = [row for row in changed.values() if row.kind == "budget" and row.difference]
    row = changed.get("KV cache") or max(parts, key=lambda row: abs(row.difference or 0), default=None)
    if row is None or row.difference is None:
        return []
    size = format_gib(abs(row.difference), 1 if abs(row.difference) >= 2**29 else 2)
    if row.name == "KV cache":
        return [f"the KV cache {'lost' if row.difference < 0 else 'gained'} {size}"]
    return [f"{row.name} {'+' if row.difference > 0 else '-'}{size}"]


def _margin(old: ComparedStart, new: ComparedStart) -> list[str]:
    """Tell how much more KV cache than one request needs the start that worked had."""
    pool, needed = old.number("kv_cache_available_bytes"), old.number("kv_cache_needed_bytes")
    if needed is None and old.value("max_model_len_tokens") == new.value("max_model_len_tokens"):
        needed = new.number("kv_cache_needed_bytes")
    if pool is None or needed is None or pool < needed:
        return []
    return [f"the start that worked left {format_gib(pool - needed, 1)} more than one request needs"]


def _outcomes(old: ComparedStart, new: ComparedStart, changes: int) -> str:
    if old.incident is None and new.incident is not None:
        return f"NEW fails: {new.incident.headline}"
    if old.incident is not None and new.incident is None:
        return "NEW works, OLD fails"
    if old.outcome != new.outcome:
        return f"OLD fails with {old.outcome}, NEW with {new.outcome}"
    return f"{changes} {'thing' if changes == 1 else 'things'} changed, no part of the memory that both logs print"


def _unknown(
    old: ComparedStart, new: ComparedStart, rows: tuple[Row, ...], explanations: tuple[Explanation, ...]
) -> list[str]:
    texts = []
    for name, side, key in (("OLD", old, "old"), ("NEW", new, "new")):
        missing = [] if side.version else ["engine version"]
        missing += [row.name for row in rows if row.name in _NAMED and getattr(row, key).origin == "not printed"]
        if missing:
            texts.append(f"not printed by {name}: {', '.join(missing)}")
        if not side.start.settings_complete:
            texts.append(f"{name} does not list all settings that the user gave")
        texts += [f"{name}: {note}" for note in side.notes]
    rest = None if different_engines(old, new) else not_explained(rows, explanations)
    if rest is not None:
        parts = [row.name for row in rows if row.name in _OF_THE_BUDGET and not row.known]
        where = f"; of {', '.join(parts)} only one log tells" if parts else ""
        texts.append(
            f"{format_gib(abs(rest))} {'less' if rest < 0 else 'more'} for the KV cache than the figures of both logs explain{where}"
        )
    return texts
