"""Check a solved value against other known figures; contradicting ones are dropped."""

from __future__ import annotations

from typing import Final, NamedTuple

from oomguard.core.facts import FactValue, format_gib
from oomguard.core.incident import Incident
from oomguard.estimate.constants import others_margin_ratio

# A parameter count from a model's name, or an unprinted data type, may be wrong by this much.
_SURE_OF_ESTIMATE: Final = 0.9
_FROM_FILES: Final = "config"
# In these failures of a start, the free memory is that before the engine used any.
_FREE_AT_START: Final = {
    "startup_free_memory_below_utilization": "device_free_bytes",
    "kv_cache_none_left": "initial_free_bytes",
    "kv_cache_too_small_for_max_len": "initial_free_bytes",
}
_NO_ROOM_SHOWN: Final = "The log does not show that the device has so much free memory."


class Contradiction(NamedTuple):
    """Why a value is not in the plan.

    ``is_proved``: the value cannot work. Otherwise nothing shows that it works.
    """

    why: str
    is_proved: bool = True


def contradiction(
    name: str, value: FactValue, incident: Incident, *, by_model: bool = False
) -> Contradiction | None:
    """Return what contradicts a value of a setting; None if nothing does.

    Args:
        name: the setting.
        value: its solved value.
        incident: the failure.
        by_model: whether the memory model solved it, which knows the weights better than the
        model's
            name does.
    """
    if isinstance(value, (str, bool)):
        return None
    if name == "gpu_memory_utilization":
        return _against_share(value, incident, by_model=by_model)
    if name == "kv_cache_memory_bytes":
        if by_model:
            return None
        return _against_kv_bytes(value, incident)
    if name == "max_model_len":
        return _against_length(value, incident)
    return None


def rank_weights(incident: Incident, *, is_exact: bool = False) -> float | None:
    """Return the least bytes of a rank's weights, printed, from files, or by the model name.

    ``is_exact`` excludes the name. None if they are unknown.
    """
    printed = incident.number("model_weights_bytes")
    if printed is not None:
        return printed
    estimated = incident.number("estimated_weights_bytes")
    if estimated is not None and incident.facts["estimated_weights_bytes"].source == _FROM_FILES:
        return estimated
    if is_exact:
        return None
    ranks = incident.settings.get("pipeline_parallel_size")
    if ranks is not None and isinstance(ranks.value, int):
        stages = int(ranks.value)
    else:
        stages = 1
    if estimated is None:
        return None
    total = incident.number("device_total_bytes")
    pool = incident.number("kv_cache_available_bytes")
    if total and pool and pool > 0 and estimated / max(1, stages) > total - pool:
        return None  # the loaded weights are smaller than the name says, such as in 4 bits
    return _SURE_OF_ESTIMATE * estimated / max(1, stages)


def free_at_start(incident: Incident) -> float | None:
    """Return what was free on the fullest device before the start; None if it was not printed."""
    name = _FREE_AT_START.get(incident.kind)
    if name is None:
        return None
    return incident.number(name)


def _against_share(value: float, incident: Incident, *, by_model: bool) -> Contradiction | None:
    total = incident.number("device_total_bytes")
    free = free_at_start(incident)
    if not total or "on_cpu" in incident.facts:
        return None
    share = value * total
    weights = rank_weights(incident, is_exact=by_model)
    if weights is not None and share <= weights:
        return Contradiction(
            f"{value:g} of the device is {format_gib(share)}, less than the weights of one rank "
            f"({format_gib(weights)})"
        )
    if free is not None and share > free + incident.slack("device_free_bytes") + incident.slack(
        "device_total_bytes"
    ):
        return Contradiction(
            f"{value:g} of the device is {format_gib(share)}, but only {format_gib(free)} is free"
        )
    return None


def _against_kv_bytes(value: float, incident: Incident) -> Contradiction | None:
    """Return what contradicts a larger KV cache; a smaller one than the present always fits."""
    has = max(
        incident.number(name) or 0.0
        for name in (
            "kv_cache_memory_bytes",
            "kv_cache_pool_bytes",
            "kv_cache_available_bytes",
            "kv_cache_requested_bytes",
        )
    )
    if value <= has or "on_cpu" in incident.facts:
        return None
    room = _room_for_kv(incident, has)
    if room is None:
        return Contradiction(_NO_ROOM_SHOWN, is_proved=False)
    if value > room:
        return Contradiction(
            f"a KV cache of {format_gib(value)} does not fit: {format_gib(room)} is free for it"
        )
    return None


def _room_for_kv(incident: Incident, has: float) -> float | None:
    """Return the largest KV cache that fits; None if the log does not show it.

    The share leaves ``has`` bytes for the KV cache. A size in bytes may also use free memory beyond
    the share.
    """
    total = incident.number("device_total_bytes")
    ratio = incident.number("gpu_memory_utilization_ratio")
    if not total:
        return None
    free = incident.number("initial_free_bytes") or incident.number("device_free_bytes") or total
    is_of_share = (
        "kv_cache_is_fixed" not in incident.facts and "kv_cache_memory_bytes" not in incident.facts
    )
    if is_of_share and ratio is not None:
        return has + max(0.0, free - ratio * total) - others_margin_ratio() * total
    weights = incident.number("model_weights_bytes")
    if weights is None:
        return None
    return (
        free
        - weights
        - (incident.number("peak_activation_bytes") or 0.0)
        - others_margin_ratio() * total
    )


def _against_length(value: float, incident: Incident) -> Contradiction | None:
    """Return what contradicts a length: longer requests of the command itself."""
    parts = [incident.number("asked_input_tokens"), incident.number("asked_output_tokens")]
    asked = sum(part for part in parts if part is not None)
    old = incident.number("max_model_len_tokens")
    if value < asked and (old is None or asked <= old):
        return Contradiction(
            f"the command itself asks for requests of {asked:.0f} tokens, more than {value:.0f}"
        )
    return None
