"""Settings in force as the engine itself echoed them: vLLM's ``non-default args`` line and the user's command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from oomguard.facts import Fact, FactValue, is_of_type
from oomguard.incident import SettingInForce

# Setting -> the fact that carries its value; the settings that a condition may ask "did the user set it" are below.
SETTING_FACTS: Final[dict[str, str]] = {
    "gpu_memory_utilization": "gpu_memory_utilization_ratio",
    "max_model_len": "max_model_len_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "tensor_parallel_size": "tensor_parallel_size",
    "enable_prefix_caching": "prefix_caching",
    "enforce_eager": "enforce_eager",
    "model": "model",
    "dtype": "dtype",
}
_ASKED: Final = (
    "gpu_memory_utilization", "max_model_len", "kv_cache_memory_bytes", "num_gpu_blocks_override", "enable_prefix_caching",
)  # fmt: skip
_ENTRY = re.compile(r"'(\w+)': ('(?:[^'\\]|\\.)*'|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|True|False|None)(?=[,}])")
_LIMITS = re.compile(r"'limit_mm_per_prompt': (\{[^{}]*\})")
_BRACES = re.compile(r"'(?:[^'\\]|\\.)*'|[{}]")
_MAX_DIGITS: Final = 18
ECHO_ANCHOR: Final = "non-default args: {"


@dataclass(frozen=True, slots=True)
class Echo:
    """Settings of one echo; ``complete`` where its end was seen, so that what is not in it was not set."""

    settings: dict[str, SettingInForce]
    complete: bool


def read_echo(text: str) -> Echo | None:
    """The settings of a ``non-default args`` line, None where the text holds none; a wrapped one is read to its end.

    Only plain values are read (numbers, text, True, False, None), and the counts of images and video, as JSON: objects print as
    ``<...>`` and say nothing.
    """
    start = text.find(ECHO_ANCHOR)
    if start < 0:
        return None
    body = text[start + len(ECHO_ANCHOR) - 1 :]
    end = _closing_brace(body)
    entries = _ENTRY.findall(body[:end] if end else body)
    found = {name: SettingInForce(name, _literal(raw), True, "printed") for name, raw in entries}
    if limits := _LIMITS.search(body[:end] if end else body):
        name = "limit_mm_per_prompt"
        found[name] = SettingInForce(name, limits.group(1).replace("'", '"'), True, "printed")
    return Echo(found, end is not None)


def _closing_brace(body: str) -> int | None:
    """Where the brace that opens ``body`` is closed, just behind it; braces inside quotes do not count."""
    depth = 0
    for match in _BRACES.finditer(body):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.end()
    return None


def _literal(raw: str) -> FactValue | None:
    if raw in {"True", "False"}:
        return raw == "True"
    if raw == "None":
        return None
    if raw.startswith("'"):
        return raw[1:-1]
    if len(raw) > _MAX_DIGITS:
        return None  # no setting has that many digits, and not every double holds them
    return float(raw) if re.search(r"[.e]", raw) else int(raw)


def setting_facts(settings: Mapping[str, SettingInForce], *, complete: bool) -> dict[str, Fact]:
    """The facts that settings carry; with ``complete`` (all that the user set is listed) also what was not set."""
    facts: dict[str, Fact] = {}
    for name, fact in SETTING_FACTS.items():
        setting = settings.get(name)
        if setting is not None and setting.value is not None and is_of_type(fact, setting.value):
            facts[fact] = Fact(fact, setting.value, setting.source)
    for name in _ASKED:
        setting = settings.get(name)
        if setting is not None and setting.set_by_user is not None:
            facts[f"{name}_set"] = Fact(f"{name}_set", setting.set_by_user, setting.source)
        elif complete:
            facts[f"{name}_set"] = Fact(f"{name}_set", False, "printed")
    return facts
