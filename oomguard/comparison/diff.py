"""Compare a start that worked with one that failed: ``oomguard.diff``."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from oomguard.comparison.comparison import ComparedStart, Comparison, Explanation, Row
from oomguard.comparison.explanations import different_engines, explain, not_explained
from oomguard.comparison.table import rows_of
from oomguard.core.errors import InputError, UsageError
from oomguard.core.facts import Fact, format_gib
from oomguard.core.incident import Diagnosis, EngineStart, Incident
from oomguard.core.text import strip_escapes
from oomguard.diagnosis.diagnose import diagnose, diagnose_stream
from oomguard.estimate.budget import budget_of_start
from oomguard.remedy.policy import Policy
from oomguard.rules.rule_files import RuleSet
from oomguard.scan.source import open_log, open_standard_input, printable_path

# Compare two starts: rows, explanations, unknowns, and one summary sentence.

# These failures concern the size of the KV cache.
_OF_THE_POOL = frozenset(
    {"kv_cache_none_left", "kv_cache_too_small_for_max_len", "cpu_node_memory"}
)
_OF_THE_BUDGET = frozenset({"weights", "activations", "non-torch", "CUDA graphs"})
# The comparison lists these rows as missing if a log does not print them.
_NAMED = _OF_THE_BUDGET | {"KV cache", "device total"}


def compare(old: ComparedStart, new: ComparedStart) -> Comparison:
    """Return the changes from ``old`` to ``new``."""
    rows = rows_of(old, new)
    explanations = explain(old, new, rows)
    return Comparison(
        old,
        new,
        _headline(old, new, rows),
        rows,
        explanations,
        tuple(_unknown(old, new, rows, explanations)),
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
    was = old.version
    now = new.version
    if different_engines(old, new):
        return (
            f"{old.start.framework}{f' {was}' if was else ''} -> "
            f"{new.start.framework}{f' {now}' if now else ''}"
        )
    if was is None and now is None:
        return "versions not printed"
    if was == now:
        return f"{now}, both"
    return f"{was or 'version not printed'} -> {now or 'version not printed'}"


def _largest(changed: dict[str, Row]) -> list[str]:
    """Describe the change of the KV cache, or else the largest change of the budget."""
    parts = [row for row in changed.values() if row.kind == "budget" and row.difference]
    row = changed.get("KV cache") or max(
        parts, key=lambda row: abs(row.difference or 0), default=None
    )
    if row is None or row.difference is None:
        return []
    size = format_gib(abs(row.difference), 1 if abs(row.difference) >= 2**29 else 2)
    if row.name == "KV cache":
        return [f"the KV cache {'lost' if row.difference < 0 else 'gained'} {size}"]
    return [f"{row.name} {'+' if row.difference > 0 else '-'}{size}"]


def _margin(old: ComparedStart, new: ComparedStart) -> list[str]:
    """Describe how much more KV cache than one request needs the working start had."""
    pool = old.number("kv_cache_available_bytes")
    needed = old.number("kv_cache_needed_bytes")
    if needed is None and old.value("max_model_len_tokens") == new.value("max_model_len_tokens"):
        needed = new.number("kv_cache_needed_bytes")
    if pool is None or needed is None or pool < needed:
        return []
    return [
        f"the start that worked left {format_gib(pool - needed, 1)} more than one request needs"
    ]


def _outcomes(old: ComparedStart, new: ComparedStart, changes: int) -> str:
    if old.incident is None and new.incident is not None:
        return f"NEW fails: {new.incident.headline}"
    if old.incident is not None and new.incident is None:
        return "NEW works, OLD fails"
    if old.outcome != new.outcome:
        return f"OLD fails with {old.outcome}, NEW with {new.outcome}"
    return (
        f"{changes} {'thing' if changes == 1 else 'things'} changed, but no memory number "
        "that both logs print"
    )


def _unknown(
    old: ComparedStart,
    new: ComparedStart,
    rows: tuple[Row, ...],
    explanations: tuple[Explanation, ...],
) -> list[str]:
    texts = []
    for name, side, key in (("OLD", old, "old"), ("NEW", new, "new")):
        if side.version:
            missing = []
        else:
            missing = ["engine version"]
        missing += [
            row.name
            for row in rows
            if row.name in _NAMED and getattr(row, key).origin == "not printed"
        ]
        if missing:
            texts.append(f"not printed by {name}: {', '.join(missing)}")
        if not side.start.settings_complete:
            texts.append(f"{name} does not list all settings of the user")
        texts += [f"{name}: {note}" for note in side.notes]
    if different_engines(old, new):
        rest = None
    else:
        rest = not_explained(rows, explanations)
    if rest is not None:
        parts = [row.name for row in rows if row.name in _OF_THE_BUDGET and not row.known]
        if parts:
            where = f"; only one log prints {', '.join(parts)}"
        else:
            where = ""
        texts.append(
            f"both logs' numbers leave {format_gib(abs(rest))} "
            f"{'less' if rest < 0 else 'more'} for the KV cache unexplained{where}"
        )
    return texts


# Select the start of a log, and add the numbers of its failure.

# A start with one of these numbers has more to compare than its version and settings.
_FIGURES: Final = frozenset(
    {
        "model_weights_bytes",
        "peak_activation_bytes",
        "cudagraph_bytes",
        "non_torch_bytes",
        "kv_cache_available_bytes",
        "kv_cache_capacity_tokens",
        "kv_cache_blocks",
        "max_concurrency",
        "kv_cache_needed_bytes",
        "desired_bytes",
    }
)
# A failure's message has these facts of the start. Its other numbers belong to the moment of the
# failure.
_OF_THE_START: Final = _FIGURES | {
    "device_total_bytes",
    "used_before_start_bytes",
    "gpu_memory_utilization_ratio",
    "mem_fraction_static_ratio",
    "max_model_len_tokens",
    "framework_version",
    "model",
    "dtype",
    "tensor_parallel_size",
    "enforce_eager",
    "max_num_seqs",
    "max_num_batched_tokens",
    "on_cpu",
    "kv_cache_pool_bytes",
    "speculative",
    "multimodal",
    "quantized",
    "lora",
}
# An allocator's message alone has some numbers (non-torch) but is not a start.
_TELLS_A_START: Final = frozenset(
    {
        "model_weights_bytes",
        "kv_cache_available_bytes",
        "kv_cache_needed_bytes",
        "kv_cache_capacity_tokens",
        "desired_bytes",
    }
)
LOOKED_FOR: Final = (
    'searched for an engine\'s start-up lines, such as "Initializing a V1 LLM engine (v0.21.0)", '
    '"Available KV cache memory: 4.90 GiB" or "server_args=ServerArgs("'
)


def compared_start(diagnosis: Diagnosis, number: int | None = None) -> ComparedStart:
    """Return one start of a log for a comparison.

    Args:
        diagnosis: the diagnosis of the log.
        number: the start, from 1. None selects the last one with numbers, else the last failed one,
            else the last.

    Raises:
        InputError: the log has no such start.
    """
    name = strip_escapes(diagnosis.source.replace("\n", "\\n")) or "text"
    starts = list(diagnosis.starts) or _of_incidents(diagnosis)
    if not starts:
        raise InputError(f"{name}: the log has no start of an engine", hint=LOOKED_FOR)
    if number is None:
        chosen = next((start for start in reversed(starts) if start.facts.keys() & _FIGURES), None)
        if chosen:
            failed = None
        else:
            failed = next((s for s in reversed(starts) if _failure(diagnosis, s.number)), None)
        start = chosen or failed or starts[-1]
    else:
        found = next((start for start in starts if start.number == number), None)
        if found is None:
            numbers = ", ".join(str(start.number) for start in starts)
            raise InputError(
                f"{name}: the log has no start {number}", hint=f"it has the starts {numbers}"
            )
        start = found
    incident = _failure(diagnosis, start.number)
    return ComparedStart(
        diagnosis.source, _with_failure(start, incident), incident, len(starts), diagnosis.notes
    )


def _failure(diagnosis: Diagnosis, number: int) -> Incident | None:
    """Return the failure that ended a start.

    It is the first out-of-memory failure, else the first incident, else None.
    """
    own = [incident for incident in diagnosis.incidents if incident.start == number]
    return next((incident for incident in own if incident.is_oom), own[0] if own else None)


def _of_incidents(diagnosis: Diagnosis) -> list[EngineStart]:
    """Return the starts that failures imply without a line of the start itself.

    Examples: a message alone, a log without its beginning.
    """
    numbers = dict.fromkeys(i.start for i in diagnosis.incidents if i.facts.keys() & _TELLS_A_START)
    return [
        EngineStart(n, i.framework, i.framework_version, None, {}, i.settings, i.settings_complete)
        for n in numbers
        if (i := _failure(diagnosis, n)) is not None
    ]


def _with_failure(start: EngineStart, incident: Incident | None) -> EngineStart:
    """Add the failure's facts to a start; the start's own printed facts take precedence."""
    facts: dict[str, Fact] = dict(start.facts)
    if incident is not None:
        facts = {
            **{name: fact for name, fact in incident.facts.items() if name in _OF_THE_START},
            **facts,
        }
    _add_capacity(facts, start)
    if incident is not None and start.framework == "unknown":
        framework = incident.framework
    else:
        framework = start.framework
    budget = budget_of_start(facts)
    if incident is not None:  # a failed start: the rest is not free, the start would have used it
        reached = {part.name for part in start.budget.parts}
        parts = tuple(part for part in budget.parts if part.name != "free" or part.name in reached)
        budget = replace(budget, parts=parts)
    return replace(start, framework=framework, facts=MappingProxyType(facts), budget=budget)


def _add_capacity(facts: dict[str, Fact], start: EngineStart) -> None:
    """Derive tokens, requests and bytes of the KV cache from each other if only some are known."""

    def number(name: str) -> float:
        fact = facts.get(name)
        if fact is None or isinstance(fact.value, (str, bool)):
            return 0.0
        return fact.value

    def solve(name: str, value: float, *sources: str) -> None:
        ratio = sum(facts[source].slack / abs(number(source)) for source in sources)
        if name == "max_concurrency":
            typed = value
        else:
            typed = round(value)
        facts[name] = Fact(name, typed, "solved", ratio * abs(value))

    longest = number("max_model_len_tokens")
    blocks = number("kv_cache_blocks")
    if "kv_cache_capacity_tokens" not in facts and blocks > 0:
        setting = start.settings.get("block_size")
        size = (
            setting.value if setting and isinstance(setting.value, int) else 16
        )  # vLLM's V0 on a GPU
        solve("kv_cache_capacity_tokens", blocks * size, "kv_cache_blocks")
    elif "kv_cache_capacity_tokens" not in facts and number("max_concurrency") > 0 and longest > 0:
        solve("kv_cache_capacity_tokens", number("max_concurrency") * longest, "max_concurrency")
    tokens = number("kv_cache_capacity_tokens")
    pool = number("kv_cache_available_bytes")
    if "max_concurrency" not in facts and tokens > 0 and longest > 0:
        solve("max_concurrency", tokens / longest, "kv_cache_capacity_tokens")
    if "kv_cache_needed_bytes" not in facts and pool > 0 and number("max_concurrency") > 0:
        solve(
            "kv_cache_needed_bytes",
            pool / number("max_concurrency"),
            "kv_cache_available_bytes",
            "max_concurrency",
        )
    if number("kv_cache_needed_bytes") > 0 and longest > 0:
        solve(
            "kv_bytes_per_token", number("kv_cache_needed_bytes") / longest, "kv_cache_needed_bytes"
        )


_STANDARD_INPUT = "-"


def diff(
    old: str | Path | Diagnosis,
    new: str | Path | Diagnosis,
    *,
    old_start: int | None = None,
    new_start: int | None = None,
    policy: Policy | None = None,
) -> Comparison:
    """Compare two engine starts: versions, settings, and each part of the memory.

        changes = oomguard.diff("yesterday.log", "today.log")
        for explanation in changes.explanations:
            print(explanation.text)

    Args:
        old: the log of the start that worked: its path, its text, or its Diagnosis. A string is a
            path if a file has that name; otherwise it is the text itself.
        new: the log of the start that failed, in the same forms.
        old_start: the start of ``old``, counted from 1; None selects the last one with numbers.
        new_start: the start of ``new``, in the same way.
        policy: what a plan for the failed start may change; None uses the default.

    Raises:
        InputError: a log is unreadable or has no such start.
        UsageError: a source is not a path, a text or a Diagnosis.
    """
    return compare(_start_of(old, old_start, policy), _start_of(new, new_start, policy))


def diff_logs(
    old: str,
    new: str,
    *,
    old_start: int | None = None,
    new_start: int | None = None,
    policy: Policy | None = None,
    rules: RuleSet | None = None,
) -> Comparison:
    """Compare the logs at two paths like ``diff``; one path may be ``-`` for standard input."""
    if old == new == _STANDARD_INPUT:
        raise UsageError(
            "OLD and NEW are both standard input", hint="give at least one log as a file"
        )
    first = compared_start(_diagnosis_of(old, policy, rules), old_start)
    return compare(first, compared_start(_diagnosis_of(new, policy, rules), new_start))


def _diagnosis_of(path: str, policy: Policy | None, rules: RuleSet | None) -> Diagnosis:
    try:
        with contextlib.closing(
            open_standard_input() if path == _STANDARD_INPUT else open_log(path)
        ) as stream:
            return diagnose_stream(stream, path, rules=rules, policy=policy)
    except OSError as error:
        raise InputError(f"{printable_path(path)}: {error.strerror or error}") from None


def _start_of(source: object, number: int | None, policy: Policy | None) -> ComparedStart:
    if isinstance(source, Diagnosis):
        return compared_start(source, number)
    if isinstance(source, os.PathLike):
        source = Path(source)
    if not isinstance(source, str | Path):
        hint = "the path of a log, its text, or what oomguard.diagnose returns"
        raise UsageError(f"diff expects a log, not {type(source).__name__}", hint=hint)
    diagnosis = diagnose(source, policy=policy)
    one_line = isinstance(source, str) and not diagnosis.source and "\n" not in source
    if one_line and not diagnosis.starts and not diagnosis.incidents:
        hint = "give the path of a log, its text, or what oomguard.diagnose returns"
        raise InputError(
            f"{printable_path(str(source))}: no such file, and not the text of a log", hint=hint
        )
    return compared_start(diagnosis, number)
