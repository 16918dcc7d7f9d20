"""Solve values from printed numbers. Rule files name these solvers.

Each solver solves one setting, or names the fact that is missing. The engine's own numbers come
first. Every figure is taken at the unfavorable end of its rounding, and every margin is here with
its reason. The rule pages show the first paragraph of a solver's docstring.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from oomguard.core.facts import GIB, MIB, FactValue, format_gib
from oomguard.core.incident import Incident
from oomguard.core.settings import default_value, engines, table_of
from oomguard.estimate.constants import most_free_ratio, others_margin_ratio, pool_margin_bytes
from oomguard.remedy.solution import Solution, not_shown

# The options of torch's allocator, and the variable that sets them, depend on the version of torch.


_EXPANDABLE: Final = "expandable_segments:True"
# The option of torch 1.10 to 2.0 against fragmentation: larger blocks are not split.
_WHOLE_BLOCKS: Final = "max_split_size_mb:128"
_HAS_EXPANDABLE: Final = (2, 1)
_HAS_PLAIN_NAME: Final = (2, 10)
# Messages of torch before 2.1. torch_npu still prints them, but has expandable segments.
_OLD_WORDING: Final = re.compile(r"total capacity;|already allocated")
# torch 2.10 still reads the CUDA name, so it works with every version.
_NAMES: Final = {"hip_oom": "PYTORCH_HIP_ALLOC_CONF", "npu_oom": "PYTORCH_NPU_ALLOC_CONF"}
_ANY_VERSION: Final = "PYTORCH_CUDA_ALLOC_CONF"
_FROM_2_10: Final = "PYTORCH_ALLOC_CONF"


def options_for_pieces(incident: Incident) -> Solution:
    """Make fragmented free memory usable: expandable segments, or whole blocks before 2.1."""
    version = _version(incident)
    if version:
        is_old = version < _HAS_EXPANDABLE
    else:
        is_old = incident.kind != "npu_oom" and _words_are_old(incident)
    if is_old:
        return Solution(
            _WHOLE_BLOCKS,
            "larger blocks are not split; this torch is too old for expandable segments (2.1)",
        )
    return Solution(_EXPANDABLE, "expandable segments join the free fragments")


def allocator_variable(incident: Incident) -> str:
    """Return the environment variable that torch reads: as its message names it, or by version."""
    named = incident.facts.get("allocator_variable")
    if named is not None:
        return str(named.value)
    version = _version(incident)
    if version and version >= _HAS_PLAIN_NAME and incident.kind != "npu_oom":
        return _FROM_2_10
    return _NAMES.get(incident.kind, _ANY_VERSION)


def _version(incident: Incident) -> tuple[int, int] | None:
    fact = incident.facts.get("torch_version")
    if fact is not None:
        found = re.match(r"(\d+)\.(\d+)", str(fact.value))
    else:
        found = None
    if found is None:
        return None
    return (int(found.group(1)), int(found.group(2)))


def _words_are_old(incident: Incident) -> bool:
    return _OLD_WORDING.search(incident.message) is not None


# A solved value that contradicts another known figure is dropped.


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


# The facts that may hold the present size of the KV cache; engines print different ones.
_KV_BYTES: Final = (
    "kv_cache_memory_bytes",
    "kv_cache_pool_bytes",
    "kv_cache_available_bytes",
    "kv_cache_requested_bytes",
)


def _against_kv_bytes(value: float, incident: Incident) -> Contradiction | None:
    """Return what contradicts a larger KV cache; a smaller one than the present always fits."""
    has = max(incident.number(name) or 0.0 for name in _KV_BYTES)
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
    asked = incident.number("asked_input_tokens") or 0
    asked += incident.number("asked_output_tokens") or 0
    old = incident.number("max_model_len_tokens")
    if value < asked and (old is None or asked <= old):
        return Contradiction(
            f"the command itself asks for requests of {asked:.0f} tokens, more than {value:.0f}"
        )
    return None


# The KV cache has no memory because the engine reserves it for CUDA graphs.

_MISSING = "memory of the CUDA graphs: not printed"


def without_graphs(incident: Incident) -> Solution:
    """Capture no CUDA graphs, so that their memory becomes KV cache."""
    return _freed(incident, True, "is reserved for CUDA graphs and becomes KV cache")


def without_graph_estimate(incident: Incident) -> Solution:
    """Reserve no memory for CUDA graphs; they use what the utilization leaves free."""
    return _freed(
        incident,
        0,
        "is the estimate for CUDA graphs and becomes KV cache; graphs use the memory next to it",
    )


def _freed(incident: Incident, value: int, what: str) -> Solution:
    size = incident.number("cudagraph_bytes")
    left = incident.number("kv_cache_available_bytes")
    if not size:
        return Solution(None, f"by how much is not known ({_MISSING})", unknown=(_MISSING,))
    if left is None:
        predicts = {}
    else:
        predicts = {"kv_cache_available_bytes": left + size}
    return Solution(value, f"{format_gib(size)} {what}", round(size), predicts=predicts)


# An engine captures the largest batch first, and smaller ones need no more memory. So if k graphs
# were captured before memory ran out, the k smallest sizes fit
# (sglang/srt/model_executor/cuda_graph_runner.py capture, 0.4.6 to 0.5.23).


def graphs_that_were_captured(incident: Incident) -> Solution:
    """Capture as many of the smallest graphs as were captured before memory ran out."""
    done = incident.number("graphs_captured")
    wanted = incident.number("graphs_wanted")
    listed = incident.facts.get("graph_sizes")
    if listed is not None:
        sizes = sorted(int(size) for size in str(listed.value).split(","))
    else:
        sizes = []
    if done is None or not sizes or (wanted is not None and len(sizes) != wanted):
        missing = "the sizes and how many of them were captured: not printed"
        return Solution(
            None, f"captures fewer graphs; by how much is not known ({missing})", unknown=(missing,)
        )
    if not done or done >= len(sizes):
        return Solution(
            None,
            f"{done:g} of {len(sizes)} graphs were captured, so their sizes are not the problem",
        )
    free = incident.number("graphs_free_bytes")
    if free is None:
        room = ""
    else:
        room = f" in {format_gib(free)}"
    value = sizes[int(done) - 1]
    return Solution(
        value, f"{done:g} of {len(sizes)} graphs were captured{room}; as many of the smallest fit"
    )


# The host part of a KV cache (SGLang's HiCache). The engine refuses a pool that is larger than the
# free host memory less 10 GiB (sglang/srt/mem_cache/memory_pool_host.py, 0.4.4 to 0.5.23). Until
# 0.4.9 the message printed the free memory without subtracting the 10 GiB.

# The unit of hicache_size.
_GB: Final = 10**9
_KEPT_BYTES: Final = 10 * GIB
# Other programs on the host may use more until the next start.
_MARGIN_RATIO: Final = 0.05


def host_cache_within_free(incident: Incident) -> Solution:
    """Give each rank's host pool its part of the free memory; ranks pin theirs at the same time."""
    figures = _figures(incident)
    if isinstance(figures, Solution):
        return figures
    wanted, usable, share = figures
    size_gb = int(usable * (1 - _MARGIN_RATIO) / _GB)
    if size_gb < 1:
        return Solution(
            None, f"{usable / _GB:.2f} GB of the host are free{share}: too little for a host cache"
        )
    return Solution(size_gb, _reason(wanted, usable, share), round(wanted - size_gb * _GB))


def host_ratio_within_free(incident: Incident) -> Solution:
    """Lower the host pool's ratio so that it fits in the free memory: ratio x free / asked for."""
    ratio = incident.number("hicache_ratio")
    figures = _figures(incident)
    if isinstance(figures, Solution):
        return figures
    wanted, usable, share = figures
    if ratio is None:
        return Solution(None, "takes less of the host", unknown=("hicache_ratio: not printed",))
    value = int(100 * ratio * usable * (1 - _MARGIN_RATIO) / wanted) / 100
    if value <= 0:
        return Solution(
            None, f"{usable / _GB:.2f} GB of the host are free{share}: too little for a host cache"
        )
    return Solution(value, _reason(wanted, usable, share), round(wanted * (1 - value / ratio)))


def _figures(incident: Incident) -> tuple[float, float, str] | Solution:
    """Return the wanted bytes, a rank's usable bytes and how they were divided.

    If a figure is missing, return a solution that names it.
    """
    wanted = incident.number("tried_bytes")
    free = incident.number("host_available_bytes")
    if not wanted or free is None:
        missing = "what the pool asks for and what the host has free: not printed"
        return Solution(
            None,
            f"takes less of the host; by how much is not known ({missing})",
            unknown=(missing,),
        )
    ranks = int(incident.number("tensor_parallel_size") or 1)
    if free >= wanted:
        usable = free - _KEPT_BYTES
    else:
        usable = free
    return wanted, max(0.0, usable / ranks), f" for each of {ranks} ranks" if ranks > 1 else ""


def _reason(wanted: float, usable: float, share: str) -> str:
    return (
        f"{usable / _GB:.2f} GB of the host are free{share}, but {wanted / _GB:.2f} GB were asked "
        "for"
    )


# An engine that fills the host's memory: on the CPU, or on a device that shares it. oomguard
# stopped it before the reserve was gone, and knows how much memory the command may use.

# What vLLM's processes need next to weights and KV cache (_WORKER_BYTES of from_estimate.py), at
# most half of a small host.
_BESIDE_ENGINE_BYTES: Final = 2 * GIB
_BESIDE_ENGINE_RATIO: Final = 0.5
# If the figures say that the old value fits, it is lowered by this anyway, because it did not.
_LEAST_STEP_RATIO: Final = 0.05
_RESERVE_MARGIN_RATIO: Final = 0.05


def utilization_for_reserve(incident: Incident) -> Solution:
    """Lower the utilization so that the engine leaves the host's reserve."""
    room = _room_of_engine(incident)
    total = incident.number("device_total_bytes") or incident.number("host_machine_bytes")
    if isinstance(room, Solution):
        return room
    if not total:
        return Solution(None, "uses less of the host", unknown=("device total: not printed",))
    now = incident.number("gpu_memory_utilization_ratio") or default_value(
        "gpu_memory_utilization", "vllm", incident.framework_version
    )
    value = int(1000 * room / total) / 1000
    if isinstance(now, float):
        value = min(value, round(now - _LEAST_STEP_RATIO, 2))
    if value <= 0:
        return _weights_too_large(incident, room)
    return Solution(value, _reason_of_room(incident, room))


def kv_bytes_for_reserve(incident: Incident) -> Solution:
    """Make the KV cache as large as the weights and the host's reserve permit."""
    room = _room_of_engine(incident)
    if isinstance(room, Solution):
        return room
    weights = _weights_bytes(incident)
    if weights is None:
        return Solution(None, "leaves more of the host", unknown=("weights: not printed",))
    size = int((room - weights) * (1 - _RESERVE_MARGIN_RATIO)) // MIB * MIB
    now = incident.number("kv_cache_memory_bytes")
    if now is not None:
        size = min(size, int(now * (1 - _RESERVE_MARGIN_RATIO)) // MIB * MIB)
    if size <= 0:
        return _weights_too_large(incident, room)
    return Solution(size, _reason_of_room(incident, room))


def _room_of_engine(incident: Incident) -> float | Solution:
    """Return the bytes for weights and KV cache, or a solution without a value."""
    room = incident.number("host_room_bytes")
    if room is None:
        missing = "the host's free memory at the start: not known"
        return Solution(None, "leaves more of the host", unknown=(missing,))
    left = room - min(_BESIDE_ENGINE_BYTES, room * _BESIDE_ENGINE_RATIO)
    weights = _weights_bytes(incident) or 0
    if left <= weights:
        return _weights_too_large(incident, max(0.0, left))
    return left


def _weights_bytes(incident: Incident) -> float | None:
    return incident.number("model_weights_bytes") or incident.number("estimated_weights_bytes")


def _weights_too_large(incident: Incident, room: float) -> Solution:
    weights = _weights_bytes(incident)
    if weights is None:
        what = ""
    else:
        what = f", and the weights are {format_gib(weights)}"
    return Solution(None, f"{format_gib(room)} is left for the engine{what}: no value fits")


def _reason_of_room(incident: Incident, room: float) -> str:
    reserve = format_gib(incident.number("host_reserve_bytes") or 0)
    return f"{format_gib(room)} is left for weights and KV cache next to a reserve of {reserve}"


# What a rank needs besides its weights (activations and a KV cache), as a ratio of the weights.
_BESIDE_WEIGHTS_RATIO: Final = 0.05
# An engine uses this share of a device by default.
_SHARE: Final = 0.9
_MOST_RANKS: Final = 64
_HOW_MANY: Final = "needs that many such devices, and the log does not show how many there are"
_LEVER: Final = "shares the weights among more devices"
_MORE_RANKS_MISSING: Final = "the size of the weights, or of the device: not printed"


def ranks_for_weights(incident: Incident) -> Solution:
    """Share the weights among the fewest devices that hold them with a twentieth to spare.

    The number is a power of two, because heads and layers must be divided evenly. A power of two
    divides those of nearly every model.
    """
    ranks = int(incident.number("tensor_parallel_size") or 1)
    of_rank = incident.number("model_weights_bytes") or incident.number("estimated_weights_bytes")
    total = incident.number("device_total_bytes")
    free = free_at_start(incident)
    if not of_rank or not total:
        return Solution(
            None,
            f"{_LEVER}; by how much is not known ({_MORE_RANKS_MISSING})",
            unknown=(_MORE_RANKS_MISSING,),
        )
    weights = of_rank * max(1, ranks)
    room = _SHARE * (total if free is None else min(total, free))
    more = 1
    while more <= ranks or weights / more * (1 + _BESIDE_WEIGHTS_RATIO) >= room:
        more *= 2
        if more > _MOST_RANKS:
            return Solution(
                None,
                f"{format_gib(weights)} of weights do not fit on {_MOST_RANKS} devices of this "
                "size",
            )
    each = format_gib(weights / more)
    why = (
        f"{format_gib(weights)} of weights over {more} devices are {each} on each, and "
        f"{format_gib(room)} is usable there"
    )
    return Solution(more, why, blocked_by=_HOW_MANY)


# Requests grow until they end, so nearly as many as filled the pool would fill it again.
_OF_RUNNING: Final = 0.75


def requests_in_pool(incident: Incident) -> Solution:
    """Take as many requests as fit at full length; otherwise three in four of those that ran."""
    capacity = incident.number("kv_cache_capacity_tokens")
    length = incident.number("max_model_len_tokens")
    running = incident.number("running_requests")
    # A decoding step needs one token per request.
    if running is None and incident.phase == "decode":
        running = incident.number("kv_slots_needed_tokens") or incident.number("max_num_seqs")
    if running is not None and running >= 2:
        value = math.floor(running * _OF_RUNNING)
        return Solution(value, f"{running:g} requests at once filled the KV cache")
    if capacity and length and capacity >= length:
        value = math.floor(capacity / length)
        return Solution(value, f"{capacity:g} tokens hold {value} requests of {length:g}")
    missing = "how many requests ran when the KV cache was full: not printed"
    return Solution(
        None,
        f"fewer requests use less of the KV cache; how many is not known ({missing})",
        unknown=(missing,),
    )


def requests_in_table(incident: Incident) -> Solution:
    """Take no more requests than the engine's request table has slots.

    The limit comes from the permitted requests, otherwise from the running requests and the free
    slots. Ranks with their own requests share the slots
    (sglang/srt/mem_cache/kv_cache_configurator.py resolve_max_num_reqs, 0.5.23). If all slots of a
    rank were free, the table itself is too small, and only more permitted requests enlarge it.
    """
    free = incident.number("request_slots_free")
    needed = incident.number("request_slots_needed")
    most = incident.number("max_num_seqs")
    running = incident.number("running_requests")
    if free is None or needed is None:
        missing = "the free and the requested slots: not printed"
        return Solution(
            None, f"needs fewer slots; by how much is not known ({missing})", unknown=(missing,)
        )
    ranks = incident.number("data_parallel_size") or 1
    if free >= needed:
        return Solution(
            None, f"{free:g} slots were free for {needed:g} requests, so another pool is full"
        )
    if most is not None and most > needed - free:
        return _of_all_places(most, free, needed, ranks)
    if running is not None:
        return Solution(
            math.floor(running + free), f"{running:g} requests ran and {free:g} slots were free"
        )
    if free >= _OF_RUNNING * needed:
        return Solution(
            math.floor(free), f"at least {free:g} slots are free for {needed:g} requests"
        )
    missing = "how many requests may run (max_running_requests), or how many ran: not printed"
    return Solution(
        None, f"needs fewer slots; by how much is not known ({missing})", unknown=(missing,)
    )


def _of_all_places(most: float, free: float, needed: float, ranks: float) -> Solution:
    """Return the number of requests from the present limit; a higher one for an empty table."""
    if ranks > 1 and free == most // ranks:
        reason = (
            f"each of {ranks:g} ranks has {free:g} of {most:g} slots, but a batch of one needs "
            f"{needed:g}"
        )
        return Solution(math.floor(needed * ranks), reason)
    return Solution(
        math.floor(most - needed + free), f"{needed:g} slots were asked for, {free:g} were free"
    )


# An engine has a default share for weights and KV pool. If no figure shows what a failed start or
# step lacks, a share on the wrong side of the default is set to it, because its authors leave that
# much for activations and graphs.

_TABLE: Final = "own_share"
_MORE_RANKS: Final = 4


def _known(incident: Incident) -> Mapping[str, Any]:
    """Return the failed engine's table; without an engine, that of one with such a share."""
    if incident.framework in engines():
        return table_of(incident.framework, _TABLE)
    for engine in engines():
        if table := table_of(engine, _TABLE):
            return table
    return {}


def own_share_ratio(incident: Incident) -> float | None:
    """Return the engine's default share by device size, otherwise by ranks; None without one."""
    known = _known(incident)
    if not known:
        return None
    total = incident.number("device_total_bytes") or incident.number("initial_free_bytes")
    if total:
        return max(0.0, 1 - kept_bytes(incident, total) / total)
    ranks = incident.number("tensor_parallel_size") or 1
    for row in known["by_ranks"]:
        if ranks >= row["ranks"]:
            return float(row["share"])
    return None


def kept_bytes(incident: Incident, total_bytes: float) -> float:
    """Return the bytes that the engine leaves for activations and graphs under known settings."""
    known = _known(incident)
    if not known:
        return 0.0
    size = known["by_size"][-1]
    for row in known["by_size"]:
        if total_bytes < row["below_bytes"]:
            size = row
            break
    ranks = incident.number("tensor_parallel_size") or 1
    tokens = max(
        incident.number("max_num_batched_tokens") or size["step_tokens"], known["least_step_tokens"]
    )
    graphs = (
        incident.number("cuda_graph_max_bs")
        or size["more_ranks" if ranks >= _MORE_RANKS else "few_ranks"]
    )
    kept: float = known["own_bytes"] + tokens * known["token_bytes"] + graphs * known["graph_bytes"]
    kept += ranks * known["rank_bytes"] + graphs * _of_parallel_attention(incident, graphs, known)
    if total_bytes > known["large_bytes"]:
        least = known["large_keeps_bytes"]
    else:
        least = 0.0
    speculative = incident.facts.get("speculative")
    if speculative is not None and speculative.value is True:
        draft = known["draft_bytes"]
    else:
        draft = 0.0
    return float(max(kept, least) + draft)


def _of_parallel_attention(incident: Incident, graphs: float, known: Mapping[str, Any]) -> float:
    """Return the additional bytes per graph row if attention ranks have their own requests."""
    flag = incident.facts.get("parallel_attention")
    ranks = incident.number("data_parallel_size") or 1
    if flag is None or flag.value is not True or ranks <= 1:
        return 0.0
    large: float = known["dp_large_graph_bytes"] if graphs > known["dp_large_rows"] else 0.0
    return float(ranks * (known["dp_graph_bytes"] + large))


# If its last page is full, each running request needs a whole new page of the KV cache.

_BACKENDS: Final = "the attention backend is not printed, and some accept only one page size"


def page_for_requests(incident: Incident) -> Solution:
    """Take the largest power of two with which each decoding request gets a page of free memory."""
    free = incident.number("kv_slots_free_tokens")
    needed = incident.number("kv_slots_needed_tokens")
    now = incident.number("block_size_tokens")
    if incident.phase != "decode" or free is None or not needed:
        missing = "how many requests needed a page: not printed"
        return Solution(
            None, f"smaller pages leave fewer tokens unused ({missing})", unknown=(missing,)
        )
    each = int(free / needed)
    if each:
        value = 1 << (each.bit_length() - 1)
    else:
        value = 0
    if not value or (now is not None and value >= now):
        return Solution(
            None, f"{free:g} tokens are free for {needed:g} requests, so pages are not the problem"
        )
    return Solution(
        value, f"{needed:g} requests each take a page of {free:g} free tokens", blocked_by=_BACKENDS
    )


# A prefill step needs memory in proportion to its tokens: activations, logits, scores against the
# whole context. With fewer tokens all of these shrink, so the free memory at the failure is the
# least that there will be.

# Free memory varies by this much between steps.
_STEP_TOKENS_MARGIN_RATIO: Final = 0.1
# A multiple of page sizes and kernel tiles.
_MULTIPLE_TOKENS: Final = 256
# Smaller steps are mostly overhead, so something else must be too large.
_LEAST_TOKENS: Final = 512
# vLLM makes float32 logits of a prompt and then an equally large tensor of log-probabilities
# (vllm/v1/worker/gpu_model_runner.py _get_prompt_logprobs_dict, 0.33.0). The log does not show
# which of them failed.
_OF_VLLM_LOGPROBS: Final = 2
_OF_A_PROMPT: Final = ("prefill", "prompt_logprobs")


def _not_printed(figures: Mapping[str, float | None]) -> tuple[str, ...]:
    missing = []
    for name, number in figures.items():
        if number is None:
            missing.append(f"{name}: not printed")
    return tuple(missing)


def step_tokens_for_tried(incident: Incident) -> Solution:
    """Limit prefill tokens per step so that the tensor fits: tokens x free / tried x 0.9."""
    limit = incident.number("max_num_batched_tokens")
    ran = incident.number("step_tokens")
    tried = incident.number("tried_bytes")
    free = incident.number("device_free_bytes")
    lever = "shrinks the activations of a step"
    if incident.phase not in _OF_A_PROMPT:
        missing = "peak activation: not printed"
        return Solution(None, f"{lever}; by how much is not known ({missing})", unknown=(missing,))
    if "multimodal_frames" in incident.facts:
        return Solution(None, "an encoder reads an image at once, so the step size does not matter")
    tokens = min(filter(None, (limit, ran)), default=None)
    figures = {"how many tokens were in the step": tokens, "tried": tried, "device free": free}
    missing_names = _not_printed(figures)
    if not tokens or not tried or free is None:
        return Solution(
            None,
            f"{lever}; by how much is not known ({', '.join(missing_names)})",
            unknown=missing_names,
        )
    if free >= tried:
        return Solution(
            None,
            f"{format_gib(free)} was free for {format_gib(tried)}, so the step is not too large",
        )
    if _is_of_vllm_logprobs(incident):
        still_wanted = tried * _OF_VLLM_LOGPROBS
    else:
        still_wanted = tried
    value = (
        int(tokens * free / still_wanted * (1 - _STEP_TOKENS_MARGIN_RATIO))
        // _MULTIPLE_TOKENS
        * _MULTIPLE_TOKENS
    )
    if value < _LEAST_TOKENS:
        return Solution(
            None,
            f"a step of {tokens:g} tokens asked for {format_gib(tried)} with {format_gib(free)} "
            "free",
        )
    reason = f"{format_gib(tried)} for {tokens:g} tokens in one step; {format_gib(free)} was free"
    return Solution(value, reason, round(tried * (1 - value / tokens)))


def _is_of_vllm_logprobs(incident: Incident) -> bool:
    return incident.framework == "vllm" and incident.phase == "prompt_logprobs"


# Margins for raising the utilization: an engine's needs vary between starts. On the CPU backend the
# node's total itself changes, so the margin is larger.
RAISE_MARGIN_RATIO: Final = 0.01
RAISE_MARGIN_CPU_RATIO: Final = 0.02
RAISE_MARGIN_BYTES: Final = 32 * MIB
# If the KV need of one request is unknown, up to this share of the device is added, if it is free.
UNKNOWN_KV_RATIO: Final = 0.10
# A warm-up that ran out of memory is tried with so many times fewer sequences.
WARMUP_DIVISOR: Final = 4
# The largest default block size, used if the tokens per block are unknown.
LARGEST_BLOCK_TOKENS: Final = 128

Solver = Callable[[Incident], Solution]


def printed_estimate(incident: Incident) -> Solution:
    """Take ``max_model_len`` from the engine's estimate, capacity, or available KV memory."""
    length = incident.number("max_model_len_tokens")
    needed = incident.number("kv_cache_needed_bytes")
    left = incident.number("kv_cache_available_bytes")
    estimate = incident.number("estimated_max_model_len_tokens")
    capacity = incident.number("kv_cache_capacity_tokens")
    if length is None:
        return Solution(None, "max_model_len: not printed", unknown=("max_model_len: not printed",))
    if estimate is not None:
        value = int(estimate)
        why = "the engine's own estimate"
    elif capacity is not None:
        value = int(capacity)
        why = "the KV cache holds this many tokens"
    elif _above_zero(needed, incident.slack("kv_cache_needed_bytes")) and _above_zero(
        left, -incident.slack("kv_cache_available_bytes")
    ):
        assert needed is not None and left is not None  # noqa: S101, PT018 - checked above
        share = (left - incident.slack("kv_cache_available_bytes")) / (
            needed + incident.slack("kv_cache_needed_bytes")
        )
        tokens = LARGEST_BLOCK_TOKENS  # one block is subtracted for the null block
        value = max(0, int(length * share) // tokens * tokens - tokens)
        why = "in proportion to the available KV memory"
    else:
        missing = "the needed or available KV memory rounds to 0, and no estimate is printed"
        return Solution(None, missing, unknown=(missing,))
    if value <= 0:
        return Solution(None, "not one block of tokens fits in the available KV memory")
    if value >= length:
        return Solution(None, f"{why}: {value} tokens fit, {int(length)} were asked for")
    if needed is not None:
        freed = round(needed * (1 - value / length))
    else:
        freed = None
    reason = f"{why}: one request of {value} tokens fits, {int(length)} does not"
    image = incident.number("image_tokens") or 0
    if value <= image:
        blocked = f"one image takes {int(image)} tokens, so prompts with one would be refused"
    else:
        blocked = None
    return Solution(
        value, reason, freed, predicts={"kv_cache_capacity_tokens": value}, blocked_by=blocked
    )


def _above_zero(value: float | None, slack: float) -> bool:
    """Return whether a printed figure is above zero at the given end of its rounding."""
    return value is not None and value + slack > 0


def kv_bytes_for_max_len(incident: Incident) -> Solution:
    """Set ``kv_cache_memory_bytes`` to hold one request of the full length.

    If the model's layout is known, the value is exact in blocks. Otherwise it is the smaller of two
    bounds. The KV need grows at most in proportion to the blocks of the length, so if the engine
    printed that ``estimate`` tokens fit in ``given`` bytes, ``given * length / estimate`` is
    enough. The other bound is the upper end of the printed need, plus one block.
    """
    ignored = incident.number("ignored_kv_cache_bytes")
    if ignored is not None:
        return Solution(
            None,
            f"{format_gib(ignored)} was set but has no effect: another setting overrides it",
        )
    blocks = incident.number("kv_cache_needed_blocks")
    block_bytes = incident.number("kv_cache_block_bytes")
    if blocks and block_bytes:
        size = int(blocks * block_bytes)
        each = format_gib(block_bytes)
        return Solution(
            size, f"holds one request of the full length: {int(blocks)} blocks of {each}"
        )
    needed = incident.number("kv_cache_needed_bytes")
    given = incident.number("kv_cache_memory_bytes")
    length = incident.number("max_model_len_tokens")
    estimate = incident.number("estimated_max_model_len_tokens")
    own_blocks = math.ceil((length or 0) / LARGEST_BLOCK_TOKENS)
    bounds = []
    if needed is not None:
        own_block_ratio = max(0.01, 1 / own_blocks if own_blocks else 0.0)
        bounds.append(
            math.ceil((needed + incident.slack("kv_cache_needed_bytes")) * (1 + own_block_ratio))
        )
    if given and own_blocks and estimate:
        bounds.append(math.ceil(given * own_blocks * LARGEST_BLOCK_TOKENS / estimate))
    if not bounds:
        return Solution(None, "the KV need is not printed", unknown=("KV need: not printed",))
    return Solution(min(bounds), f"holds one request of {int(length or 0)} tokens")


def blocks_for_max_len(incident: Incident) -> Solution:
    """Raise ``num_gpu_blocks_override`` to one request of the full length, if memory holds it."""
    given = incident.number("num_gpu_blocks_override")
    fitting = incident.number("kv_cache_fitting_blocks")
    length = incident.number("max_model_len_tokens")
    estimate = incident.number("estimated_max_model_len_tokens")
    needed = incident.number("kv_cache_needed_blocks")
    if needed is None and given and length and estimate:
        needed = math.ceil((given - 1) * length / estimate) + 1  # one block is the engine's own
    if needed is None:
        return Solution(
            None,
            "the KV blocks of one request are not known",
            unknown=("KV blocks of one request: not known",),
        )
    what = (
        f"one request of {'the full length' if length is None else f'{int(length)} tokens'} takes "
        f"{int(needed)} blocks"
    )
    if fitting is None:
        blocked = "not known: how many KV blocks fit in memory"
        return Solution(
            int(needed), what, unknown=("KV blocks that fit: not printed",), blocked_by=blocked
        )
    if needed > fitting:
        return Solution(None, f"{what}, but only {int(fitting)} fit in memory")
    return Solution(int(needed), f"{what}, and {int(fitting)} fit in memory")


def utilization_for_max_len(incident: Incident) -> Solution:
    """Raise the utilization by what one request lacks: (needed - available) / total."""
    needed = incident.number("kv_cache_needed_bytes")
    left = incident.number("kv_cache_available_bytes")
    if needed is None or left is None:
        return Solution(None, "the KV need is not printed", unknown=("KV need: not printed",))
    missing = (
        needed
        - left
        + incident.slack("kv_cache_needed_bytes")
        + incident.slack("kv_cache_available_bytes")
    )
    return _raise_by(
        incident,
        missing,
        f"one request of max_model_len tokens lacks {format_gib(missing)}",
        bare_bytes=missing,
    )


def utilization_for_kv_cache(incident: Incident) -> Solution:
    """Raise the utilization until one request fits: (used + need + margin) / total."""
    left = incident.number("kv_cache_available_bytes")
    if left is None:
        return Solution(
            None,
            "how much is missing is not printed",
            unknown=("available KV cache memory: not printed",),
        )
    needed = incident.number("kv_cache_needed_bytes")
    length = incident.number("max_model_len_tokens")
    total = incident.number("device_total_bytes")
    need = wish = 0.0
    if needed is not None:
        need = needed + incident.slack("kv_cache_needed_bytes")
        if length is None:
            tokens = "max_model_len"
        else:
            tokens = f"{int(length)}"
        what = f", one request of {tokens} tokens needs {format_gib(need)}"
    else:
        wish = (total or 0.0) * UNKNOWN_KV_RATIO
        what = "; one request's need is not known, so up to a tenth of the device is added"
    deficit = -left + incident.slack("kv_cache_available_bytes") + incident.slack("desired_bytes")
    return _raise_by(
        incident,
        deficit + need,
        f"the KV cache lacks {format_gib(-left)}{what}",
        bare_bytes=-left,
        wish_bytes=wish,
    )


def _raise_by(
    incident: Incident,
    missing_bytes: float,
    what: str,
    *,
    bare_bytes: float,
    wish_bytes: float = 0.0,
) -> Solution:
    """Return the utilization with ``missing_bytes`` and a margin more.

    ``wish_bytes`` are added as far as they are free.
    """
    total = incident.number("device_total_bytes")
    ratio = incident.number("gpu_memory_utilization_ratio")
    free = incident.number("device_free_bytes")
    smallest = incident.number("smallest_helpful_device_bytes")
    if smallest:
        below = f"; no utilization up to 1.0 helps on a card below {format_gib(smallest)}"
    else:
        below = ""
    if not total:
        reason = (
            f"would have to rise by {format_gib(bare_bytes)} / device total, which is not "
            f"printed{below}"
        )
        return Solution(None, reason, unknown=("device total: not printed",))
    desired = incident.number("desired_bytes")
    if ratio is None and desired is None:
        rise = f"{format_gib(bare_bytes)} / {format_gib(total)} = {bare_bytes / total:.2f}"
        reason = f"would have to rise by {rise} from a value that is not printed{below}"
        return Solution(None, reason, unknown=("gpu_memory_utilization: not printed",))
    if ratio is not None:
        before = ratio * total
    else:
        before = float(desired or 0)
    if incident.facts.get("on_cpu"):
        margin_ratio = RAISE_MARGIN_CPU_RATIO
    else:
        margin_ratio = RAISE_MARGIN_RATIO
    margin = max(RAISE_MARGIN_BYTES, margin_ratio * (before + missing_bytes))
    sure_total = total - incident.slack("device_total_bytes")
    value = rounded(math.ceil, (before + missing_bytes + margin) / sure_total)
    if free is None:
        ceiling = most_free_ratio()
    else:
        ceiling = min(most_free_ratio(), free / total)
    if wish_bytes:
        wished = rounded(
            math.floor, min(ceiling, (before + missing_bytes + margin + wish_bytes) / sure_total)
        )
        value = max(value, wished)
    if value <= 0:
        return Solution(None, "nothing is missing by these figures")
    if value > ceiling:
        reached = (before + bare_bytes) / total
        limit = below.removeprefix("; ") or f"only {ceiling:.2f} of the device is free"
        if reached > 1 and not below:
            limit = "no utilization up to 1.0 helps"
        reason = (
            f"would have to rise by {format_gib(bare_bytes)} / {format_gib(total)} = "
            f"{bare_bytes / total:.2f}, "
            f"to {reached:.2f} before any KV cache; {limit}"
        )
        return Solution(None, reason)
    # This frees no device memory: the engine may use more, and all of that becomes KV cache.
    left = incident.number("kv_cache_available_bytes")
    if left is None:
        predicts = {}
    else:
        predicts = {"kv_cache_available_bytes": value * total - before + left}
    return Solution(value, f"{what}; margin {format_gib(margin)}", predicts=predicts)


def rounded(direction: Callable[[float], int], ratio: float) -> float:
    """Return a utilization in thousandths; a hundredth of a large device is over a gigabyte."""
    if direction is math.ceil:
        nudge = -1e-9
    else:
        nudge = 1e-9
    return direction(1000 * ratio + nudge) / 1000


def utilization_within_free(incident: Incident) -> Solution:
    """Lower the utilization to what is free: (free - margin) / total."""
    free = incident.number("device_free_bytes")
    total = incident.number("device_total_bytes")
    if free is None or not total:
        return Solution(
            None, "free and total memory are not printed", unknown=("free memory: not printed",)
        )
    margin = others_margin_ratio() * total
    free_sure = free - incident.slack("device_free_bytes") - margin
    value = rounded(math.floor, free_sure / (total + incident.slack("device_total_bytes")))
    if value <= 0:
        return Solution(None, f"only {format_gib(free)} of {format_gib(total)} is free")
    ratio = incident.number("gpu_memory_utilization_ratio")
    desired = incident.number("desired_bytes")
    if ratio is not None and value >= ratio:
        return Solution(
            None,
            f"{format_gib(free)} of {format_gib(total)} is free, more than utilization {ratio} "
            "asks for",
        )
    if desired is not None:
        freed = round(desired - value * total)
    else:
        freed = None
    reason = (
        f"{format_gib(free)} of {format_gib(total)} is free; margin "
        f"{format_gib(free - value * total)}"
    )
    return Solution(value, reason, freed, predicts={"desired_bytes": value * total})


def kv_bytes_within_free(incident: Incident) -> Solution:
    """Lower ``kv_cache_memory_bytes`` to what is free."""
    free = incident.number("device_free_bytes")
    asked = incident.number("kv_cache_requested_bytes")
    if free is None or asked is None:
        return Solution(None, "free memory is not printed", unknown=("free memory: not printed",))
    on_host = "on_cpu" in incident.facts
    total = incident.number("device_total_bytes") or free
    value = int(
        free - incident.slack("device_free_bytes") - pool_margin_bytes(total, is_on_host=on_host)
    )
    if value <= 0:
        return Solution(None, f"only {format_gib(free)} is free")
    if value >= asked:
        return Solution(None, f"{format_gib(free)} is free, {format_gib(asked)} was asked for")
    return Solution(
        value,
        f"{format_gib(free)} is free, {format_gib(asked)} was asked for",
        round(asked - value),
    )


def rows_that_fit(incident: Incident) -> Solution:
    """Run as many rows at a time as fit; the first rows are few, and measure what a row needs.

    No log prints a row's need. The model behind a failed call solves this setting; without one, the
    solution names what is missing.
    """
    needed = ("batch_size", "row_bytes", "baseline_bytes", "device_total_bytes")
    missing = []
    for name in needed:
        if name not in incident.facts:
            missing.append(name)
    if missing:
        why = not_shown(missing)
    else:
        why = "the memory of one row is not known"
    return Solution(None, why, unknown=tuple(f"{n}: not measured" for n in missing))


def sequences_for_warmup(incident: Incident) -> Solution:
    """Lower ``max_num_seqs`` to a quarter; the warm-up's buffers grow in proportion to it.

    A quarter frees three quarters of the warm-up's memory. If the log prints how much was missing,
    the share of the device is solved instead.
    """
    figures = (
        "tried_bytes",
        "device_free_bytes",
        "device_total_bytes",
        "gpu_memory_utilization_ratio",
    )
    if all(name in incident.facts for name in figures):
        return Solution(None, "shrinks the buffers of the warm-up")
    sequences = incident.number("max_num_seqs")
    if sequences is None:
        return Solution(
            None, "the text does not show max_num_seqs", unknown=("max_num_seqs: not printed",)
        )
    value = int(sequences) // WARMUP_DIVISOR
    if value < 1:
        return Solution(None, f"{int(sequences)} sequences are too few to lower")
    reason = (
        f"the warm-up with {int(sequences)} sequences needs memory in proportion to them; a "
        "quarter frees three quarters of it"
    )
    return Solution(value, reason)


PRINTED: Final[dict[str, Solver]] = {
    "printed_estimate": printed_estimate,
    "blocks_for_max_len": blocks_for_max_len,
    "kv_bytes_for_max_len": kv_bytes_for_max_len,
    "utilization_for_max_len": utilization_for_max_len,
    "utilization_for_kv_cache": utilization_for_kv_cache,
    "utilization_within_free": utilization_within_free,
    "kv_bytes_within_free": kv_bytes_within_free,
    "rows_that_fit": rows_that_fit,
    "sequences_for_warmup": sequences_for_warmup,
}


# A pool leaves too little memory next to it, so it is lowered by what the failed allocation lacked.

# After a sampler's sort (12 bytes per logit) follow a softmax and masks (6 bytes): vLLM 0.32,
# topk_topp_sampler.py apply_top_k_top_p_pytorch.
_LEAST_DEFAULT_UTILIZATION: Final = 0.9  # of all versions of vLLM
_LATER_IN_SAMPLER_RATIO: Final = 0.5
# If other processes use more of the device than this, its size does not determine the engine's
# default share.
_OTHERS_RATIO: Final = 0.1
# The share includes the weights, which are rarely printed: a pool can give back at most half of it.
_GIVES_BACK_RATIO: Final = 0.5
# An allocation that fails with so much more memory free was refused for another reason (OG309).
_REFUSED_WITH_ROOM_RATIO: Final = 1.2


def _still_wanted(incident: Incident, tried_bytes: float) -> float:
    """Return the bytes of a failed allocation, and of those that would have followed it."""
    if incident.kind == "sampler_warmup_oom":
        return tried_bytes * (1 + _LATER_IN_SAMPLER_RATIO)
    return tried_bytes


def lacking_beside(incident: Incident, fact: str, setting: str) -> tuple[float, tuple[str, ...]]:
    """Return what a failed allocation next to a pool lacks, and the missing figures.

    Args:
        incident: the failure.
        fact: the fact with the present size or share of the pool.
        setting: the name for that fact if it is missing.
    """
    total = incident.number("device_total_bytes")
    tried = incident.number("tried_bytes")
    free = incident.number("device_free_bytes")
    figures = {
        setting: incident.number(fact),
        "device total": total or None,
        "tried": tried,
        "device free": free,
    }
    missing = _not_printed(figures)
    if not total or tried is None or free is None:
        return 0.0, missing
    return max(0.0, _still_wanted(incident, tried) - free) + others_margin_ratio() * total, missing


def utilization_for_tried(incident: Incident) -> Solution:
    """Lower the utilization so that an allocation fits: by (tried - free + margin) / total."""
    lacking, missing = lacking_beside(
        incident, "gpu_memory_utilization_ratio", "gpu_memory_utilization"
    )
    ratio = incident.number("gpu_memory_utilization_ratio")
    total = incident.number("device_total_bytes")
    assumed = ""
    if missing == ("gpu_memory_utilization: not printed",) and incident.framework == "vllm":
        ratio = _default_utilization(incident)
        missing = ()
        assumed = f"; its present value is not shown, {ratio:g} is assumed"
    if missing or ratio is None or not total:
        why = f"makes room next to the KV pool; by how much is not known ({', '.join(missing)})"
        return Solution(None, why, unknown=missing)
    value = rounded(math.floor, ratio - lacking / total)
    if value <= 0:
        tried = format_gib(incident.number("tried_bytes") or 0)
        return Solution(None, f"{tried} next to the KV pool does not fit in {format_gib(total)}")
    reason = f"next to the KV pool at least {format_gib(lacking)} more is needed{assumed}"
    return Solution(value, reason, round((ratio - value) * total))


def _default_utilization(incident: Incident) -> float:
    """Return the version's default share; the lowest of all versions if the version is unknown."""
    own = default_value("gpu_memory_utilization", "vllm", incident.framework_version)
    if isinstance(own, (int, float)):
        return float(own)
    return _LEAST_DEFAULT_UTILIZATION


def kv_bytes_for_tried(incident: Incident) -> Solution:
    """Lower ``kv_cache_memory_bytes`` so that an allocation fits: by tried - free + margin."""
    lacking, missing = lacking_beside(incident, "kv_cache_memory_bytes", "kv_cache_memory_bytes")
    pool = incident.number("kv_cache_memory_bytes")
    if missing or pool is None:
        return Solution(None, f"by how much is not known ({', '.join(missing)})", unknown=missing)
    value = int((pool - lacking) // MIB * MIB)
    if value <= 0:
        return Solution(
            None,
            f"{format_gib(incident.number('tried_bytes') or 0)} does not fit next to any KV cache",
        )
    return Solution(
        value,
        f"next to the KV cache at least {format_gib(lacking)} more is needed",
        round(pool - value),
    )


def static_share_for_tried(incident: Incident) -> Solution:
    """Lower the static share so that an allocation fits: by (tried - free + margin) / total.

    If the share is not printed, a failed graph capture shows it: by then the allocated memory is
    weights, pool and the graphs' own pools. Otherwise it is the engine's default, if the command is
    shown and sets none. If the captured graphs were counted, the remaining ones need no more each.
    """
    lacking, missing = lacking_beside(incident, "mem_fraction_static_ratio", "mem_fraction_static")
    share = incident.number("mem_fraction_static_ratio")
    total = incident.number("device_total_bytes")
    of_graphs = _lacking_for_graphs(incident)
    if of_graphs is not None:
        total = total or incident.number("initial_free_bytes")
        lacking = max(lacking, of_graphs + others_margin_ratio() * (total or 0.0))
        # The captured graphs show what is lacking, so the failed allocation's figures are not
        # needed.
        if total:
            missing = tuple(filter(_is_of_static_share, missing))
    if share is not None:
        seen = None
    else:
        seen = _share_in_force(incident)
    if seen is not None and missing == ("mem_fraction_static: not printed",):
        share = seen[0]
        missing = ()
    least = incident.number("static_share_least_ratio") or 0.0
    tried = incident.number("tried_bytes")
    free = incident.number("device_free_bytes")
    if (
        of_graphs is None
        and tried is not None
        and free is not None
        and free > _REFUSED_WITH_ROOM_RATIO * tried
    ):
        return Solution(
            None,
            f"{format_gib(free)} was free for {format_gib(tried)}, so the share is not the problem",
        )
    assumed = ""
    is_default = missing == ("mem_fraction_static: not printed",) and incident.framework == "sglang"
    if is_default and (own := own_share_ratio(incident)) is not None:
        share = own
        missing = ()
        assumed = f"; its present value is not shown, {own:.3f} is assumed"
    if missing or share is None or not total:
        return _own_share(incident, share, least, missing)
    value = rounded(math.floor, share - lacking / total)
    if value <= max(share * _GIVES_BACK_RATIO, least):
        if of_graphs is not None:
            what = "the graphs"
        else:
            what = format_gib(incident.number("tried_bytes") or 0)
        return Solution(
            None, f"{what} next to weights and pool does not fit in {format_gib(total)}"
        )
    freed = round((share - value) * total)
    if seen is None:
        now = assumed
    else:
        now = f"; {seen[1].format(seen[0])}"
    return Solution(
        value, f"next to weights and pool at least {format_gib(lacking)} more is needed{now}", freed
    )


def _is_of_static_share(missing: str) -> bool:
    return missing.startswith("mem_fraction_static")


def _lacking_for_graphs(incident: Incident) -> float | None:
    """Return the most that the remaining graphs need, from those captured; None if not counted."""
    done = incident.number("graphs_captured")
    wanted = incident.number("graphs_wanted")
    free = incident.number("graphs_free_bytes")
    if (
        incident.phase != "cudagraph_capture"
        or not done
        or wanted is None
        or free is None
        or wanted <= done
    ):
        return None
    return free * (wanted / done - 1)


def _own_share(
    incident: Incident, share: float | None, least: float, missing: tuple[str, ...]
) -> Solution:
    """Return the engine's default share if the present one is higher; otherwise what is missing."""
    own = own_share_ratio(incident)
    if own is None:
        value = None
    else:
        value = rounded(math.floor, own)
    if value is not None and share is not None and least < value < share:
        why = (
            "the engine's default share; what the failure lacks is not known "
            f"({', '.join(missing)})"
        )
        return Solution(value, why, unknown=missing)
    why = f"makes room next to the pool; by how much is not known ({', '.join(missing)})"
    return Solution(None, why, unknown=missing)


def _share_in_force(incident: Incident) -> tuple[float, str] | None:
    """Return an unprinted share and how it follows from other figures; None if it does not.

    The pool gets free_after_load - free_before_load * (1 - share), unless a number of tokens limits
    it. During graph capture the allocated memory is weights, pool and the graphs' own pools.
    """
    names = ("initial_free_bytes", "loaded_free_bytes", "kv_cache_available_bytes")
    before, loaded, pool = (incident.number(name) for name in names)
    if (
        before
        and loaded is not None
        and pool
        and pool < loaded
        and "max_total_tokens" not in incident.facts
    ):
        return 1 - (loaded - pool) / before, "{:.3f} of the free memory went to weights and pool"
    allocated = incident.number("allocated_bytes")
    total = incident.number("device_total_bytes")
    if incident.phase == "cudagraph_capture" and allocated is not None and total:
        held = (allocated - (incident.number("private_pool_bytes") or 0)) / total
        return held, "tensors filled {:.1%} of the device before the capture"
    own = own_share_ratio(incident)
    others = incident.number("others_ratio") or 0.0
    if "launch_shown" not in incident.facts or own is None or not total or others > _OTHERS_RATIO:
        return None
    return own, "no share is set, and {:.3f} is the engine's default for such a device"


# SGLang's ``mem_fraction_static`` is the share of weights and KV pool; the rest is for activations
# and graphs. The pool gets free_after_load - free_before_load * (1 - share)
# (sglang/srt/model_executor/model_runner.py profile_max_num_token, 0.2 to 0.5.23). So the lowest
# share is that of the weights, and lowering it makes a pool that is too small worse.

# A useful pool has at least this ratio of the free memory.
_POOL_RATIO: Final = 0.02
_HIGHEST: Final = 0.97
# A share this far below the default was set too low; one nearer to it may fail for other reasons.
_WELL_BELOW: Final = 0.05
# The limit if the weights take more: the rest must do for activations, on devices of 80 GB or more.
_HIGHEST_ABOVE_WEIGHTS: Final = 0.975


def static_share_for_pool(incident: Incident) -> Solution:
    """Raise the share of weights and pool to the engine's default, and above the weights' share."""
    before = incident.number("initial_free_bytes")
    least = incident.number("static_share_least_ratio")
    now = incident.number("mem_fraction_static_ratio")
    if least is None:
        return _without_figures(incident, now)
    # Without these figures, the lowest share with a pool, as SGLang's own message advises.
    if before:
        wished = min(_HIGHEST, 1 - kept_bytes(incident, before) / before)
    else:
        wished = 0.0
    value = max(rounded(math.floor, wished), rounded(math.ceil, least + _POOL_RATIO))
    if value > _HIGHEST_ABOVE_WEIGHTS or (now is not None and value <= now):
        return Solution(
            None,
            f"the weights take {least:.3f} of the free memory, so no share leaves enough for "
            "activations",
        )
    if before is None:
        pool = {}
    else:
        pool = {"kv_cache_available_bytes": before * (value - least)}
    return Solution(
        value, f"the weights alone take {least:.3f} of the memory that was free", predicts=pool
    )


def _without_figures(incident: Incident, now: float | None) -> Solution:
    """Return the engine's default share if the present one is well below; else what lacks."""
    missing = "what is free before and after loading the weights: not printed"
    own = own_share_ratio(incident)
    if own is None:
        value = 0.0
    else:
        value = rounded(math.floor, own)
    weights = incident.number("estimated_weights_bytes")
    total = incident.number("device_total_bytes")
    fits = not weights or not total or weights / total + _POOL_RATIO < value
    if now is not None and now <= value - _WELL_BELOW and fits:
        why = f"the engine's default share; the lowest that is enough is not known ({missing})"
        return Solution(value, why, unknown=(missing,))
    if now is None:
        above = ""
    else:
        above = f", above {now:g}"
    why = f"leaves memory for the KV cache{above}; by how much is not known ({missing})"
    return Solution(None, why, unknown=(missing,))


# llama.cpp prints what the first device had free, the buffer of the weights, and the buffers of the
# whole context. The compute buffer also grows with the context.

_CONTEXT_STEP_TOKENS: Final = 1024
# Before the compute buffer is printed, it gets this share of what the weights leave, or more.
_COMPUTE_RATIO: Final = 0.25
_LEAST_COMPUTE_BYTES: Final = 512 * MIB
# The driver and other programs may take a little more at the next start.
_DRIVER_RATIO: Final = 0.03


def context_for_buffers(incident: Incident) -> Solution:
    """Take the longest context whose buffers fit next to the weights in the free memory."""
    free = incident.number("initial_free_bytes")
    weights = incident.number("model_weights_bytes")
    context = incident.number("max_model_len_tokens")
    tried = incident.number("tried_bytes")
    is_compute = "buffer" in incident.facts and incident.facts["buffer"].value == "compute"
    cache = tried
    if is_compute:
        cache = incident.number("kv_buffer_bytes")
    if not free or not weights or not context or not tried or not cache:
        missing = "the free memory and each buffer: not printed"
        return Solution(None, "shrinks the KV cache in proportion", unknown=(missing,))
    if incident.kind != "llamacpp_oom":
        return Solution(None, "shrinks the KV cache in proportion")  # the figures are a GPU's
    if "several_devices" in incident.facts:
        missing = "how the buffers are divided among the devices: not known"
        return Solution(None, "shrinks the KV cache in proportion", unknown=(missing,))
    room = free - weights
    if is_compute:
        needed = cache + tried
        usable = room - _DRIVER_RATIO * free
    else:
        needed = cache
        usable = room - max(_COMPUTE_RATIO * room, _LEAST_COMPUTE_BYTES)
    steps = math.floor(context * usable / needed / _CONTEXT_STEP_TOKENS)
    value = steps * _CONTEXT_STEP_TOKENS
    if value <= 0:
        why = f"{format_gib(max(room, 0))} next to the weights is too little for a context"
        return Solution(None, why)
    if value >= context:
        return Solution(None, "the log's figures leave room for this context")
    why = (
        f"the weights leave {format_gib(room)} of the free {format_gib(free)}, and the buffers of "
        f"{context:g} tokens need {format_gib(needed)}"
    )
    return Solution(value, why, round(needed * (1 - value / context)))


# All solvers that a rule's fix may name.
SOLVERS: Final[Mapping[str, Solver]] = {
    **PRINTED,
    "utilization_for_tried": utilization_for_tried,
    "kv_bytes_for_tried": kv_bytes_for_tried,
    "static_share_for_tried": static_share_for_tried,
    "graphs_that_were_captured": graphs_that_were_captured,
    "host_cache_within_free": host_cache_within_free,
    "kv_bytes_for_reserve": kv_bytes_for_reserve,
    "utilization_for_reserve": utilization_for_reserve,
    "host_ratio_within_free": host_ratio_within_free,
    "context_for_buffers": context_for_buffers,
    "options_for_pieces": options_for_pieces,
    "page_for_requests": page_for_requests,
    "ranks_for_weights": ranks_for_weights,
    "requests_in_pool": requests_in_pool,
    "requests_in_table": requests_in_table,
    "static_share_for_pool": static_share_for_pool,
    "step_tokens_for_tried": step_tokens_for_tried,
    "without_graph_estimate": without_graph_estimate,
    "without_graphs": without_graphs,
}
