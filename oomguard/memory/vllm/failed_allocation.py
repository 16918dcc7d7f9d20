"""A failed allocation of vLLM: what it was for, by its bytes, and what the host has free where it is this machine's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from oomguard.errors import OomguardError
from oomguard.facts import GIB, Fact, FactValue
from oomguard.incident import Incident
from oomguard.memory.vllm.allocations import MOST_SURE, Named, allocation_told_by, name_allocation
from oomguard.memory.vllm.array_bytes import array_bytes
from oomguard.settings import value_in_force

# The memory model is loaded where a model may be read; a saved log alone is told at once.
if TYPE_CHECKING:
    from oomguard.memory.model.headers import Parameter
    from oomguard.memory.model.shape import ModelShape
    from oomguard.memory.vllm.failed_start import FailedStart
    from oomguard.memory.vllm.start import VllmSettings

KINDS: Final = frozenset(
    {"cuda_oom", "hip_oom", "xpu_oom", "npu_oom", "host_oom", "sampler_warmup_oom", "pooler_warmup_oom"}
)
# Tokens of a block where the user sets none, on a device and on the CPU; a row of block numbers is padded to this many tokens.
_BLOCK_TOKENS: Final = (16, 128)
_ALIGNED_TOKENS: Final = 128
_NGRAM: Final = frozenset({"ngram", "[ngram]", "ngram_gpu"})
_SETTINGS: Final = ("max_num_seqs", "max_model_len", "max_num_batched_tokens")


@dataclass(frozen=True, slots=True)
class FailedAllocation:
    """An allocation that failed, and the start behind it where that can be read.

    Attributes:
        named: what it was for.
        start: None where its model cannot be read.
        by_bytes: whether its bytes tell what it was for.
        prompt_tokens: of the longest prompt, where a step has to hold it whole; else 0.
    """

    named: Named
    start: FailedStart | None
    by_bytes: bool = True
    prompt_tokens: int = 0


def failed_allocation(
    incident: Incident, model: str | None = None, *, reads_models: bool = True
) -> FailedAllocation | None:
    """Return what a failed allocation was for, None where neither its bytes nor the traceback tell it.

    Args:
        incident: the failure, with the settings in force.
        model: the folder or hub name to read in place of the one that the log names.
        reads_models: whether a folder that the log names may be read.
    """
    exact = array_bytes(incident)
    tried = incident.number("tried_bytes") if exact is None else exact
    if incident.kind not in KINDS or incident.framework != "vllm" or not tried or tried <= 0:
        return None
    start = _start(incident, model) if reads_models else None
    numbers = _numbers(incident, start)
    slack = incident.slack("tried_bytes") if exact is None else 0.0
    named = name_allocation(int(tried), slack, numbers, incident.phase, on_host=incident.kind == "host_oom")
    told = allocation_told_by(tried, numbers, (incident.kind, incident.phase))
    prompt = _whole_prompt(incident, numbers)
    if named is not None and (not slack or told is None or told.allocation.name == named.product.allocation.name):
        return FailedAllocation(named, start, prompt_tokens=prompt)
    return (
        None if told is None else FailedAllocation(Named(told, MOST_SURE), start, by_bytes=False, prompt_tokens=prompt)
    )


def _whole_prompt(incident: Incident, numbers: Mapping[str, int]) -> int:
    """Return the tokens of the longest prompt where chunked prefill is off: vLLM refuses a smaller step (vllm/config/scheduler.py)."""
    whole = incident.facts.get("whole_prompts")
    return numbers.get("max_model_len", 0) if whole is not None and whole.value is True else 0


def _start(incident: Incident, model: str | None) -> FailedStart | None:
    """Return the start behind a failure with its settings filled in, None where its model cannot be read here."""
    from oomguard.memory.vllm.defaults import most_default_rows, with_defaults
    from oomguard.memory.vllm.failed_start import read_failed_start

    start = read_failed_start(incident, model, of_unknown_size=80 * GIB)
    if start is None:
        return None
    settings = with_defaults(start.settings, start.model.shape, [])
    return replace(start, settings=replace(settings, max_num_seqs=most_default_rows(start.settings, settings)))


def with_allocation(incident: Incident, model: str | None = None, *, local: bool = False) -> Incident:
    """Return the incident with what its failed allocation was for; unchanged where nothing tells it.

    ``local`` says that it failed on this machine, just now: its folders may be read, and what its host has free counts.
    """
    found = failed_allocation(incident, model, reads_models=local or model is not None)
    facts: dict[str, Fact] = dict(incident.facts)
    if local and incident.kind == "host_oom":
        from oomguard.observe.host_memory import read_available_bytes, read_data_limit_bytes, read_total_bytes

        read = {
            "host_available_bytes": read_available_bytes(),
            "process_data_limit_bytes": read_data_limit_bytes(),
            "host_total_bytes": read_total_bytes(),
        }
        for name, size in read.items():
            less = incident.number(name)  # the engine's own processes may have less
            known = [int(one) for one in (size, less) if one is not None]
            facts.update({name: Fact(name, min(known), "measured")} if known else {})
    if found is not None and found.by_bytes:
        named = found.named
        told: dict[str, FactValue] = {
            "allocation": named.product.allocation.name,
            "allocation_terms": f"{named.product.allocation.what} ({named.product})",
            "allocation_sure_ratio": named.sure,
        }
        if named.product.allocation.of_request:
            told["allocation_of_request"] = True
        facts.update({name: Fact(name, value, "solved") for name, value in told.items()})
    return replace(incident, facts=MappingProxyType(facts))


def _numbers(incident: Incident, start: FailedStart | None) -> dict[str, int]:
    """Return what a tensor's size may be a product of: the settings in force, and the model's numbers where they are read."""
    numbers = (
        {}
        if start is None
        else _of_shape(start.model.shape)
        | _of_settings(start.settings)
        | _of_cache(start, incident)
        | _of_encoder(start)
        | _of_weights(start, incident)
    )
    for name in (*_SETTINGS, "max_loras", "max_lora_rank"):
        known = value_in_force(name, incident.settings, incident.facts)
        if known is not None and isinstance(known[0], int) and not isinstance(known[0], bool) and known[0] > 0:
            numbers[name] = known[0]
    lora = value_in_force("enable_lora", incident.settings, incident.facts)
    if lora is not None and lora[0] is True:
        numbers["enable_lora"] = 1
    drafted = _drafted(incident)
    if drafted is not None:
        numbers |= {"speculative_config": 1, "drafted": drafted + 1}
    if "ngram_frames" in incident.facts or _speculation(incident).get("method") in _NGRAM:
        numbers["ngram" if incident.kind == "host_oom" else "ngram_gpu"] = 1
    return {name: value for name, value in numbers.items() if value > 0}


def _of_shape(shape: ModelShape) -> dict[str, int]:
    from oomguard.memory.model.parameters import has_gate, has_plain_activation

    try:
        mlp = shape.number("intermediate_size") or 4 * shape.hidden
        experts, expert_mlp = shape.number("num_experts") or 0, shape.number("moe_intermediate_size") or mlp
    except OomguardError:
        return {}
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "dtype": shape.dtype_bytes,
        "vocabulary": shape.vocab,
        "vocabulary_and_itself": shape.vocab + 1,
        "hidden": shape.hidden,
        "queries": queries,
        "keys": keys,
        "fused_queries": queries + 2 * keys,
        "mlp": mlp,
        "plain_mlp": mlp if has_plain_activation(shape) else 0,
        "double_mlp": 2 * mlp if has_gate(shape) else 0,
        "experts": experts,
        "expert_mlp": expert_mlp,
        "double_expert_mlp": 2 * expert_mlp,
    }


def _of_settings(settings: VllmSettings) -> dict[str, int]:
    known = {name: getattr(settings, name) or 0 for name in _SETTINGS} | {"ranks": settings.tensor_parallel_size}
    if settings.enable_lora:
        known |= {"enable_lora": 1, "max_loras": settings.max_loras, "max_lora_rank": settings.max_lora_rank}
    length, block = settings.max_model_len, settings.block_size or _BLOCK_TOKENS[settings.device == "cpu"]
    if length:
        aligned = max(1, _ALIGNED_TOKENS // math.gcd(_ALIGNED_TOKENS, block))  # get_block_table_width
        known["blocks_unpadded"] = -(-length // block)
        known["blocks_per_request"] = -(-length // (block * aligned)) * aligned
    return known


def _of_cache(start: FailedStart, incident: Incident) -> dict[str, int]:
    """Return the KV cache's blocks where their number or their bytes were set, and the bytes of one."""
    from oomguard.memory.vllm.exact_kv import exact_kv

    cache = exact_kv(start)
    if cache is None:
        return {}
    override, pool = incident.number("num_gpu_blocks_override"), start.settings.kv_cache_memory_bytes
    blocks = int(override) if override else (pool or 0) // cache.block_bytes
    page = max(page for group in cache.layout.groups for page in group.pages_bytes)
    return {"kv_blocks": blocks, "kv_page": page, "kv_block": cache.block_bytes}


def _of_weights(start: FailedStart, incident: Incident) -> dict[str, int]:
    """Return the elements of the parameter that is nearest to what failed while weights were loaded: shapes that no width tells."""
    tried, element = incident.number("tried_bytes"), start.model.shape.dtype_bytes
    if incident.phase != "load_weights" or not tried or not start.model.exact:
        return {}
    from oomguard.memory.vllm.failed_start import read_draft

    found = {"matrix": _nearest(start.model.parameters, tried / element)}
    draft = read_draft(incident, start.settings.dtype)
    if draft is not None and draft.exact:
        found["draft_matrix"] = _nearest(draft.parameters, tried / element)
    return found


def _nearest(parameters: Iterable[Parameter], elements: float) -> int:
    """Return the elements of the parameter that has about so many, alone or put together with another one like it; 0 without any."""
    sizes = {times * parameter.elements for parameter in parameters for times in (1, 2)}
    return min(sizes, key=lambda size: abs(size - elements), default=0)


def _of_encoder(start: FailedStart) -> dict[str, int]:
    """Return the images or audios that the start profiles at once, the patches of one, and the widths of their encoder."""
    from oomguard.memory.vllm.encoder_profile import profile_encoder
    from oomguard.memory.vllm.processor_kwargs import encoder_of

    try:
        encoder = encoder_of(start.model, start.settings)
        profile = None if encoder is None else profile_encoder(encoder, start.settings, start.model.shape.dtype_bytes)
    except OomguardError:
        return {}
    if encoder is None or profile is None:
        return {}
    patches = round(profile.tokens_per_item * encoder.patches_per_token)
    return {
        f"{encoder.modality}s": profile.items,
        **({"patches": patches, "patches_and_class": patches + 1} if encoder.in_prompt else {"frames": patches}),
        "encoder_width": encoder.width,
        "encoder_mlp": encoder.mlp_width,
    }


def _drafted(incident: Incident) -> int | None:
    """Return how many tokens are drafted, None where nothing tells it."""
    value = _speculation(incident).get("num_speculative_tokens")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    printed = incident.number("drafted_tokens")
    return None if printed is None else int(printed)


def _speculation(incident: Incident) -> Mapping[str, object]:
    """Return the configuration of speculative decoding as the user gave it, empty where nothing tells it."""
    known = value_in_force("speculative_config", incident.settings, incident.facts)
    try:
        config = json.loads(known[0]) if known is not None and isinstance(known[0], str) else None
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, Mapping) else {}
