"""A KV cache size that was set in bytes and has no effect: something that nobody sees sets another one over it.

On vLLM's CPU backend VLLM_CPU_KVCACHE_SPACE comes before flag, file and argument (check_and_update_config in
vllm/platforms/cpu.py, 0.32), and a script may set it. The size that the engine prints is the one that counts.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from oomguard.facts import Fact
from oomguard.incident import Incident, SettingInForce

_NAME: Final = "kv_cache_memory_bytes"


def with_explicit_pool(incident: Incident) -> Incident:
    """Return the incident with the size that the engine prints in place of one that differs by more than rounding."""
    given, printed = incident.facts.get(_NAME), incident.facts.get("explicit_kv_cache_bytes")
    if given is None or printed is None or isinstance(given.value, str) or isinstance(printed.value, str):
        return incident
    if abs(given.value - printed.value) <= printed.slack:
        return incident
    facts = {
        **incident.facts,
        _NAME: replace(printed, name=_NAME),
        "ignored_kv_cache_bytes": Fact("ignored_kv_cache_bytes", given.value, given.source, line=given.line),
    }
    in_force = SettingInForce(_NAME, printed.value, True, "printed")
    return replace(incident, facts=MappingProxyType(facts), settings={**incident.settings, _NAME: in_force})
