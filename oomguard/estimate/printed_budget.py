"""Derive facts from printed facts with vLLM's memory equation, and add their budget.

``available_kv(u) = total * u - consumed`` with ``consumed`` independent of the utilization ``u``.
Sources: vllm/v1/worker/gpu_worker.py determine_available_memory 0.33; cpu_worker.py 0.32 has the
same form with the worker's resident bytes. The slope is the device's total, so a lower utilization
always leaves less for the KV cache.

Sleep mode returns an engine's device memory and takes it again. The log's lines become facts about
who has the memory: an engine that sleeps or wakes up, or a trainer next to it.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from oomguard.core.facts import GIB, Fact, FactValue, format_gib, format_rounded, number_of
from oomguard.core.files import read_tables
from oomguard.core.incident import Incident, SettingInForce
from oomguard.estimate.budget import add_shares, budget_of_failure
from oomguard.scan.context import with_requested_share

# A KV cache size in bytes has no effect if something hidden overrides it.
#
# On vLLM's CPU backend VLLM_CPU_KVCACHE_SPACE overrides flag, file and argument
# (check_and_update_config in vllm/platforms/cpu.py, 0.32), and a script may set it. The engine uses
# the size that it prints.

_NAME: Final = "kv_cache_memory_bytes"


def with_explicit_pool(incident: Incident) -> Incident:
    """Return the incident with the printed pool size if it differs from the setting.

    Rounding does not count as a difference.
    """
    given = incident.facts.get(_NAME)
    printed = incident.facts.get("explicit_kv_cache_bytes")
    if (
        given is None
        or printed is None
        or isinstance(given.value, str)
        or isinstance(printed.value, str)
    ):
        return incident
    if abs(given.value - printed.value) <= printed.slack:
        return incident
    facts = {
        **incident.facts,
        _NAME: replace(printed, name=_NAME),
        "ignored_kv_cache_bytes": Fact(
            "ignored_kv_cache_bytes", given.value, given.source, line=given.line
        ),
    }
    in_force = SettingInForce(_NAME, printed.value, True, "printed")
    return replace(
        incident, facts=MappingProxyType(facts), settings={**incident.settings, _NAME: in_force}
    )


# SGLang's ``mem_fraction_static`` covers weights and KV pool together. The pool comes after the
# weights.
#
# It gets free_after_load - free_before_load * (1 - share):
# sglang/srt/model_executor/model_runner.py profile_max_num_token, 0.2 to 0.5.10, and
# mem_cache/kv_cache_configurator.py _profile_available_bytes, 0.5.23.

_ENGINE: Final = "sglang"
_OF_A_PROMPT: Final = ("prefill", "prompt_logprobs")
# SGLang prints these numbers once the pool exists.
_OF_A_POOL: Final = ("kv_cache_available_bytes", "pool_free_bytes", "kv_cache_capacity_tokens")
# While torch builds a model, every reserved block has a tensor. A step frees its activations and
# leaves unused blocks.
_BUILT_UNUSED_RATIO: Final = 0.002
_BUILT_OWN_RATIO: Final = 0.9
# The table of requests has 4 bytes per token of context, plus a small reserve, for each running
# request. Without a setting the number of requests is one of these (model_runner.py
# init_memory_pool, 0.3 to 0.5.10; mem_cache/kv_cache_configurator.py, 0.5.23).
_ENTRY_BYTES: Final = 4
_DEFAULT_REQUESTS: Final = (2048, 4096)
_LEAST_TABLE_BYTES: Final = 4 << 30
_CONTEXT_MULTIPLE: Final = 65536
_MORE_TOKENS: Final = 16


def with_static_share(facts: dict[str, Fact], phase: str) -> str:
    """Add the weights' share of the initially free memory, and return the engine's phase.

    Args:
        facts: the known facts; the function adds to them.
        phase: the phase from the log's lines. If the lines show none, the function infers weight
            loading from sizes.
    """
    _add_least_share(facts)
    if facts["framework"].value != _ENGINE:
        return phase
    _add_request_table(facts, phase)
    has_pool = "later_weights_frames" in facts
    for name in _OF_A_POOL:
        has_pool = has_pool or number_of(facts, name) is not None
    if phase == "unknown" and not has_pool and _builds_model(facts):
        phase = "load_weights"
    is_prompt = phase in _OF_A_PROMPT and "multimodal_frames" not in facts
    facts["prompt_step"] = Fact("prompt_step", is_prompt, "solved")
    if has_pool:
        facts["pool_stands"] = Fact("pool_stands", True, "solved")
    elif phase == "load_weights":
        facts["before_kv_cache"] = Fact("before_kv_cache", True, "solved")
    return phase


def _add_least_share(facts: dict[str, Fact]) -> None:
    names = ("initial_free_bytes", "model_weights_bytes", "loaded_free_bytes")
    before, weights, after = (number_of(facts, name) for name in names)
    if weights is not None and before is None and after is not None:
        before = after + weights
        facts["initial_free_bytes"] = Fact("initial_free_bytes", round(before), "solved")
    elif weights is not None and before is not None and after is None:
        after = before - weights
    counts_both = "mem_fraction_static_ratio" in facts or facts["framework"].value == _ENGINE
    if counts_both and before and after is not None:
        facts["static_share_least_ratio"] = Fact(
            "static_share_least_ratio", max(0.0, 1 - after / before), "solved"
        )
    least = number_of(facts, "static_share_least_ratio")
    now = number_of(facts, "mem_fraction_static_ratio")
    if least is not None:
        holds = now is not None and now > least
        facts["static_share_holds_weights"] = Fact("static_share_holds_weights", holds, "solved")


def _add_request_table(facts: dict[str, Fact], phase: str) -> None:
    """Name the table of requests if the failed request has exactly its size.

    The function also adds the model's context if no setting gives one. Without a known context it
    only accepts a number of rows that is not a power of two, because round sizes divide each other.
    """
    tried = number_of(facts, "tried_bytes")
    requests = number_of(facts, "max_num_seqs")
    if (
        tried is None
        or tried < _LEAST_TABLE_BYTES
        or "buffer" in facts
        or phase not in {"kv_cache_init", "unknown"}
    ):
        return
    context = number_of(facts, "max_model_len_tokens")
    for most in (requests,) if requests else _DEFAULT_REQUESTS:
        for rows in (most + 1,) if context is None else (most + 1, most):
            slack = facts["tried_bytes"].slack
            low = (tried - slack) / _ENTRY_BYTES / rows
            high = (tried + slack) / _ENTRY_BYTES / rows
            if context is None and high - low > _CONTEXT_MULTIPLE / 16:
                continue  # such a wide range always contains some length
            tokens = context or int(high) // _CONTEXT_MULTIPLE * _CONTEXT_MULTIPLE
            if tokens >= _CONTEXT_MULTIPLE and low - _MORE_TOKENS <= tokens <= high:
                facts["buffer"] = Fact("buffer", "request table", "solved")
                facts.setdefault(
                    "max_model_len_tokens", Fact("max_model_len_tokens", int(tokens), "solved")
                )
                return


def _builds_model(facts: dict[str, Fact]) -> bool:
    """Return whether the process only holds a model under construction.

    The evidence is its stack frames, or its size and numbers.
    """
    if "device_context_frames" in facts:
        return True
    names = ("estimated_weights_bytes", "device_total_bytes", "own_ratio", "unused_ratio")
    weights, total, own, unused = (number_of(facts, name) for name in names)
    too_large = weights is not None and total is not None and weights > total
    return (
        too_large
        and own is not None
        and own > _BUILT_OWN_RATIO
        and unused is not None
        and unused < _BUILT_UNUSED_RATIO
    )


# A model's name gives its parameters and bits if nothing else does.

# A mixture of experts like 8x7B shares its attention: Mixtral-8x7B has 46.7 of 56 billion
# parameters, 8x22B has 141 of 176.
_SHARED_EXPERTS_RATIO: Final = 0.82
_EXPERTS: Final = re.compile(r"(?i)(?<![\w.])(\d{1,3})x(\d{1,4}(?:\.\d{1,3})?)b(?![a-z])")
_BILLIONS: Final = re.compile(r"(?i)(?<![\w.])(?:a)?(\d{1,4}(?:\.\d{1,3})?)b(?![a-z])")
_ACTIVE: Final = re.compile(r"(?i)(?<![\w.])a\d+(?:\.\d+)?b(?![a-z])")
_REVISION: Final = re.compile(r"[0-9a-f]{40}")
_BITS: Final = (
    (
        re.compile(r"(?i)int-?8|(?<!\d)8-?bit"),
        8.5,
    ),  # before the methods' names, because AWQ and GPTQ also exist in 8 bits
    (re.compile(r"(?i)awq|gptq|bnb-?4bit|4-?bit|int4|w4a16|nf4|nvfp4|mxfp4|fp4|q4_|q4-|iq4"), 4.5),
    (re.compile(r"(?i)fp8|w8a8|w8a16|q8_"), 8.5),
    (re.compile(r"(?i)q6_|(?<!\d)6-?bit"), 6.6),
    (re.compile(r"(?i)q5_|(?<!\d)5-?bit"), 5.6),
    (re.compile(r"(?i)q[23]_|(?<!\d)[23]-?bit"), 3.2),
)


def parameters_from_name(model: str) -> float | None:
    """Return the number of parameters in a model's name, or None without a size.

    Examples: 32e9 for Qwen3-32B, 144e9 for 8x22B, 30e9 for 30B-A3B. In a path the last part with a
    size
    counts; a revision's hash has none.
    """
    for part in reversed(model.split("/")):
        if _REVISION.fullmatch(part):
            continue
        size = _parameters(part.replace("_", "-"))
        if size is not None:
            return size
    return None


def _parameters(name: str) -> float | None:
    experts = _EXPERTS.search(name)
    if experts:
        return int(experts.group(1)) * float(experts.group(2)) * 1e9 * _SHARED_EXPERTS_RATIO
    sizes = [float(size) for size in _BILLIONS.findall(_ACTIVE.sub("", name))]
    if sizes:
        return max(sizes) * 1e9
    return None


def bits_from_name(model: str) -> float | None:
    """Return the bits per parameter, with scales, if the name shows a quantization; else None."""
    for pattern, bits in _BITS:
        if pattern.search(model):
            return bits
    return None


def bits_of_dtype(dtype: str | None) -> float:
    """Return the bits per parameter of a data type.

    Without a type it is half precision, which engines load.
    """
    if dtype and dtype.removeprefix("torch.") in {"float32", "float"}:
        return 32.0
    return 16.0


def derive(incident: Incident) -> Incident:
    """Return the incident with every derived fact and its budget."""
    incident = with_explicit_pool(incident)
    facts = with_requested_share(
        incident.facts
    )  # a total from the user meets a request that only the log has
    total_fact = facts.get("device_total_bytes")
    if total_fact is not None and not isinstance(total_fact.value, str) and total_fact.value < 0:
        del facts[
            "device_total_bytes"
        ]  # an underflow or a damaged line: no device is that small, so no share follows

    def number(name: str) -> float | None:
        return number_of(facts, name)

    def slack(*names: str) -> float:
        total_slack = 0.0
        for name in names:
            if name in facts:
                total_slack += facts[name].slack
        return total_slack

    total = number("device_total_bytes")
    ratio = number("gpu_memory_utilization_ratio")
    available = number("kv_cache_available_bytes")
    desired = number("desired_bytes")
    free = number("device_free_bytes")
    if desired is None and total is not None and ratio is not None:
        desired = total * ratio
    if desired is not None and available is not None and available <= 0:
        facts["consumed_bytes"] = Fact(
            "consumed_bytes",
            round(desired - available),
            "solved",
            slack("desired_bytes", "kv_cache_available_bytes"),
        )
        if total:
            facts["break_even_utilization_ratio"] = Fact(
                "break_even_utilization_ratio", (desired - available) / total, "solved"
            )
    if available is not None and available < 0 and ratio is not None and ratio < 1:
        smallest = -available / (1 - ratio)
        facts["smallest_helpful_device_bytes"] = Fact(
            "smallest_helpful_device_bytes", round(smallest), "solved"
        )
    if (
        incident.kind in {"startup_free_memory_below_utilization", "cpu_node_memory"}
        and available is None
        and total
        and free is not None
    ):
        facts["used_before_start_bytes"] = Fact(
            "used_before_start_bytes", round(total - free), "solved"
        )
    pool = number("kv_cache_memory_bytes")
    if pool is not None and incident.kind == "kv_cache_too_small_for_max_len":
        facts["kv_cache_pool_bytes"] = Fact(
            "kv_cache_pool_bytes", int(pool), facts["kv_cache_memory_bytes"].source
        )
    if pool is not None or (
        "num_gpu_blocks_override" in facts and incident.kind != "cpu_node_memory"
    ):
        facts.setdefault(
            "kv_cache_is_fixed", Fact("kv_cache_is_fixed", True, "solved")
        )  # no share decides its size
    early = "profiling_frames" in facts or incident.phase == "load_weights"
    if early and "tried_bytes" in facts and incident.framework == "vllm":
        facts["before_kv_cache"] = Fact("before_kv_cache", True, "solved")  # no share is in use yet
    if incident.kind == "host_oom":
        incident = _with_host_phase(incident, facts)
        _add_next_limit(facts)
    incident = _of_ggml(incident, facts)
    facts["framework"] = Fact("framework", incident.framework, "solved")
    share = facts.get("gpu_memory_utilization_ratio") or facts.get("mem_fraction_static_ratio")
    if share is not None:
        facts.setdefault(
            "device_share_ratio", Fact("device_share_ratio", share.value, share.source)
        )
    add_shares(facts, incident.message)
    _add_named_weights(facts)
    if incident.kind in {"startup_free_memory_below_utilization", "cpu_node_memory"}:
        weights = number("model_weights_bytes") or number("estimated_weights_bytes") or 0.0
        is_above = "on_cpu" not in facts and free is not None and weights > free
        facts["weights_above_free"] = Fact("weights_above_free", is_above, "solved")
    phase = with_sleep(facts, incident, with_static_share(facts, incident.phase))
    facts["phase"] = Fact("phase", phase, "solved")
    return replace(
        incident,
        phase=phase,
        facts=MappingProxyType(facts),
        budget=budget_of_failure(incident, facts),
    )


def _of_ggml(incident: Incident, facts: dict[str, Fact]) -> Incident:
    """Name Ollama if it runs llama.cpp, and add half of the context as a first try."""
    if incident.framework not in {"llama.cpp", "ollama"}:
        return incident
    context = number_of(facts, "max_model_len_tokens")
    program = facts.get("run_by")
    if context:
        facts["half_context_tokens"] = Fact("half_context_tokens", int(context) // 2, "solved")
    is_ollama = program is not None and program.value == "ollama"
    if is_ollama:
        return replace(incident, framework="ollama")
    return incident


def _with_host_phase(incident: Incident, facts: dict[str, Fact]) -> Incident:
    """Add the cause of the host's memory use by the engine's phase.

    Loading ends with the last shard of the weights.
    """
    known = facts.get("host_phase")
    if known is not None and known.value == "loaded":
        del facts["host_phase"]
        if incident.phase == "load_weights":
            return replace(incident, phase="unknown")
        return incident
    if incident.phase == "load_weights":
        facts.setdefault("host_phase", Fact("host_phase", "load_weights", "solved"))
    return incident


# The names of pods: those of a deployment end with a hash and five characters, those of a stateful
# set with a number.
_OF_DEPLOYMENT: Final = re.compile(r"(.+)-[a-z0-9]{8,10}-[a-z0-9]{5}")
_OF_STATEFUL_SET: Final = re.compile(r"(.+)-\d{1,4}")
_NEXT_LIMIT_RATIO: Final = 1.5


def _add_next_limit(facts: dict[str, Fact]) -> None:
    """Add the memory limit to try next, in whole GiB, and the workload of the killed pod."""
    limit = number_of(facts, "host_limit_bytes")
    if limit:
        wanted = max(_NEXT_LIMIT_RATIO * limit, limit + (number_of(facts, "tried_bytes") or 0))
        facts["host_next_limit"] = Fact("host_next_limit", str(math.ceil(wanted / GIB)), "solved")
    pod = facts.get("host_pod")
    if pod is None:
        return
    for kind, pattern in (("deployment", _OF_DEPLOYMENT), ("statefulset", _OF_STATEFUL_SET)):
        found = pattern.fullmatch(str(pod.value))
        if found is not None:
            facts["host_workload"] = Fact("host_workload", f"{kind}/{found.group(1)}", "solved")
            return


def _add_named_weights(facts: dict[str, Fact]) -> None:
    """Add one rank's weight bytes from the model's name and data type if none were printed."""
    model = facts.get("model")
    stated = facts.get("stated_model")
    if stated:
        parameters = parameters_from_name(str(stated.value))
    else:
        parameters = None
    if parameters is not None:
        facts["stated_weights_bytes"] = Fact(
            "stated_weights_bytes", round(2 * parameters), "solved", 0.2 * parameters
        )
    if model:
        named_bits = bits_from_name(str(model.value))
    else:
        named_bits = None
    if named_bits is not None:
        facts.setdefault("quantized", Fact("quantized", True, "solved"))
    if model:
        parameters = parameters_from_name(str(model.value))
    else:
        parameters = None
    if model is None or parameters is None:
        return
    facts["model_parameters"] = Fact("model_parameters", parameters, "solved", 0.05 * parameters)
    if "expert_parallel" in facts:
        return  # the number of ranks that share the experts is unknown
    if "tensor_parallel_size" in facts:
        ranks = int(facts["tensor_parallel_size"].value)
    else:
        ranks = 1
    dtype = facts.get("dtype")
    quantized = facts.get("quantized")
    bits = named_bits or (4.5 if quantized and quantized.value else None)
    if bits is None and dtype is None and facts["framework"].value == "transformers":
        bits = 32.0  # transformers before 5.0 loads this without a data type
    bits = bits or bits_of_dtype(str(dtype.value) if dtype else None)
    for name, width in (("estimated_weights_bytes", bits), ("estimated_weights_4bit_bytes", 4.5)):
        size = round(parameters * width / 8 / max(1, ranks))
        facts[name] = Fact(name, size, "solved", 0.1 * size)


# An engine that sleeps returns its device memory, and takes it again when it wakes up.

_TRAINERS_FILE: Final = Path(__file__).with_name("trainers.toml")
_ENGINE_NAME: Final = re.compile(r"(?i)vllm|enginecore|sglang|trt.?llm|lmdeploy")
_PID: Final = re.compile(r"\bpid=(\d+)")
_LISTED: Final = re.compile(r"\bProcess (\d+) has ([\d.]+) (GiB|MiB)")
# One process of nvidia-smi: a row of its table, or a line of comma-separated values.
_TABLE_ROW: Final = re.compile(r"(\d{2,})\s+[CGM+]{1,4}\s+(\S.*?)\s+(\d+) ?MiB")
_CSV_ROW: Final = re.compile(r"(?<![\w.-])(\d{2,})\s*,(?:\s*([^,\n]*?)\s*,)?\s*(\d+) MiB")
_MIB: Final = 1 << 20
# Below this a process has only its own context and libraries on the device.
_LEAST_HOLDER_BYTES: Final = 3 * GIB
_KEPT_RATIO: Final = 0.15
_UNKNOWN: Final = "The log does not show how much memory the engine freed when it went to sleep."


@functools.cache
def _roles() -> dict[str, dict[str, str]]:
    """Return the roles of processes, each with its program."""
    return read_tables("trainers", [_TRAINERS_FILE])[_TRAINERS_FILE]


class _Process(NamedTuple):
    pid: int
    name: str
    size_bytes: int


def with_sleep(facts: dict[str, Fact], incident: Incident, phase: str) -> str:
    """Add the log's sleep facts and return the phase.

    The phase is ``wake_up`` if the sleep mode's allocator failed after the engine slept: the
    allocator maps memory only at the start and when it wakes up.
    """
    _add_framework(facts, incident)
    if _framework(facts) and not _is(facts, "asleep"):
        _solve(facts, "rollout_awake", True)
    level = number_of(facts, "sleep_level") or 1
    if "sleep_used_bytes" in facts and level == 1:
        _solve(facts, "sleeps_on_host", True)
    about_sleep = facts.keys() & {
        "asleep",
        "sleep_backup_frames",
        "gathered_frames",
        "synced_frames",
        "rollout_awake",
    }
    # A trainer that prints its steps has long started its engine.
    runs = facts.keys() & {"asleep", "trainer_step", "trainer_finished_step"}
    if runs and _is(facts, "pool_allocator"):
        phase = "wake_up"
    if not about_sleep and phase != "wake_up":
        return phase
    if _is(facts, "sleep_backup_frames"):
        return "unknown"
    is_of_device = incident.kind in {"cuda_oom", "hip_oom", "npu_oom"}
    is_any_step = is_of_device and phase in {"unknown", "generate", "prefill", "decode"}
    sends = facts.keys() & {"gathered_frames", "synced_frames"}
    if is_any_step and _is(facts, "asleep") and _framework(facts) and not sends:
        phase = "training"  # the engine sleeps, so the step is the trainer's
    process = incident.location.process or ""
    if process.startswith(tuple(_roles()["trainers"])):
        _solve(facts, "trainer_frames", True)
        # Its own allocator waits for memory that the rollout engine still has.
        if incident.framework == "sglang" and _is(facts, "pool_allocator"):
            _solve(facts, "trainer_waits", "slime" in _framework(facts))
    _add_sleeper(facts, incident, phase)
    _add_holder(facts, incident, phase)
    text = " ".join(_sentences(facts, phase)) or _UNKNOWN
    used = facts.get("sleep_used_bytes")
    facts.setdefault(
        "sleep_account",
        Fact("sleep_account", text, "solved", line=None if used is None else used.line),
    )
    return phase


def _solve(facts: dict[str, Fact], name: str, value: FactValue) -> None:
    facts.setdefault(name, Fact(name, value, "solved"))


def _framework(facts: dict[str, Fact]) -> str:
    if "rl_framework" not in facts:
        return ""
    return str(facts["rl_framework"].value)


def _add_framework(facts: dict[str, Fact], incident: Incident) -> None:
    """Name the trainer's program by the Ray actors in the failure's lines."""
    if "rl_framework" in facts:
        return
    lines = "\n".join(line.text for line in incident.evidence)
    shown = f"{incident.location.process or ''}\n{lines}"
    roles = _roles()
    for role, program in (*roles["trainers"].items(), *roles["rollouts"].items()):
        if program and role in shown:
            _solve(facts, "rl_framework", program)
            return


def _own_pid(text: str) -> int | None:
    found = _PID.search(text)
    if found is None:
        return None
    return int(found[1])


def _add_sleeper(facts: dict[str, Fact], incident: Incident, phase: str) -> None:
    """Add the memory that a sleeping engine still has, if the log shows it.

    The allocator's message may list the sleeper by its PID. SGLang prints no sizes, so another
    process's memory counts as the sleeper's.
    """
    if not _is(facts, "asleep") or phase == "wake_up":
        return
    total = number_of(facts, "device_total_bytes") or math.inf
    kept: float | None = None
    if _is(facts, "sleep_kept_by_engine"):
        kept = number_of(facts, "sleep_used_bytes")
    elif incident.framework == "sglang":
        kept = number_of(facts, "other_process_in_use_bytes") or number_of(facts, "others_bytes")
    elif "sleep_process" in facts:
        pid = _own_pid(str(facts["sleep_process"].value))
        for one in _of_message(incident.message):
            if one.pid == pid:
                kept = one.size_bytes
    if kept is not None and kept > max(_KEPT_RATIO * total, _LEAST_HOLDER_BYTES):
        _solve(facts, "sleeper_bytes", round(kept))
        facts["sleep_kept_by_engine"] = Fact("sleep_kept_by_engine", True, "solved")
    elif kept is not None and total is not math.inf:
        facts["sleep_kept_by_engine"] = Fact("sleep_kept_by_engine", False, "solved")


def _of_message(message: str) -> list[_Process]:
    found = []
    for pid, size, unit in _LISTED.findall(message):
        scale = GIB
        if unit == "MiB":
            scale = _MIB
        found.append(_Process(int(pid), "", round(float(size) * scale)))
    return found


def _of_list(text: str) -> list[_Process]:
    found = []
    for line in text.splitlines():
        row = _TABLE_ROW.search(line) or _CSV_ROW.search(line)
        if row is not None:
            found.append(_Process(int(row[1]), row[2] or "", int(row[3]) * _MIB))
    return found


def _add_holder(facts: dict[str, Fact], incident: Incident, phase: str) -> None:
    """Name the process that has the memory: another program, the rollout engine or the trainer."""
    if "sleeper_bytes" in facts:
        return
    listed = facts.get("device_processes")
    if listed is not None:
        other = _other_of(_of_list(str(listed.value)), facts, incident)
        if other is not None:
            _name_holder(facts, other)
            return
    if _is(facts, "trainer_waits"):
        _solve(facts, "device_holder", "rollout")
        used = number_of(facts, "device_listed_used_bytes")
        if used is not None:
            _solve(facts, "device_holder_bytes", round(used))
        return
    if _is(facts, "trainer_frames") or "trainer_reserved_bytes" in facts or _framework(facts):
        _solve(facts, "device_holder", "trainer")
        reserved = number_of(facts, "trainer_reserved_bytes")
        if reserved is not None:
            _solve(facts, "device_holder_bytes", round(reserved))
        if phase == "wake_up":
            _solve(facts, "trainer_frames", True)


def _other_of(
    processes: list[_Process], facts: dict[str, Fact], incident: Incident
) -> _Process | None:
    """Return the largest listed process that is not the failed engine, or None."""
    slept = str(facts["sleep_process"].value) if "sleep_process" in facts else ""
    own = {_own_pid(incident.location.process or ""), _own_pid(slept)}
    engines = []
    rest = []
    for one in processes:
        if _ENGINE_NAME.search(one.name):
            engines.append(one)
        if one.pid not in own:
            rest.append(one)
    # If no line shows the engine's own PID, the smallest engine is the one that slept.
    if own == {None} and engines:
        rest.remove(min(engines, key=lambda engine: engine.size_bytes))
    largest = max(rest, key=lambda one: one.size_bytes, default=None)
    if largest is None or largest.size_bytes < _LEAST_HOLDER_BYTES:
        return None
    return largest


def _name_holder(facts: dict[str, Fact], process: _Process) -> None:
    kind = "other"
    if _ENGINE_NAME.search(process.name):
        kind = "engine"
    actor = process.name.removeprefix("ray::")
    for role, program in _roles()["trainers"].items():
        if actor.startswith(role):
            kind = "trainer"
            _solve(facts, "trainer_frames", True)
            if program:
                _solve(facts, "rl_framework", program)
    name = f"PID {process.pid}"
    if process.name:
        name = f"{process.name} (PID {process.pid})"
    _solve(facts, "device_holder", kind)
    _solve(facts, "device_holder_name", name)
    _solve(facts, "device_holder_pid", process.pid)
    _solve(facts, "device_holder_bytes", process.size_bytes)


def _sentences(facts: dict[str, Fact], phase: str) -> list[str]:
    """Return sentences about the failed cycle, the freed, remaining and newly used memory."""
    sentences = [*_failed_cycle(facts, phase), *_holder(facts), *_first_residue(facts)]
    freed = facts.get("sleep_freed_bytes")
    used = facts.get("sleep_used_bytes")
    needed = facts.get("wake_needed_bytes") or freed
    each = facts.get("sleep_used_each")
    if freed is not None and used is not None:
        sentences.append(
            f"Its last sleep freed {_size(freed)}; {_size(used)} of the device stayed in use."
        )
    has_several = each is not None and " " in str(each.value)
    if has_several and not _is(facts, "residue_grows"):
        sentences.append(f"In use after each sleep: {facts['sleep_used_each'].value} GiB.")
    if needed is None or phase != "wake_up":
        return sentences
    if needed is not freed:
        sentences.append(f"It needs {_size(needed)} to wake up.")
    total = number_of(facts, "device_total_bytes")
    if total and used is not None:
        taken = round(total - float(needed.value) - float(used.value))
        if taken > 0:
            slack = needed.slack + used.slack
            sentences.append(
                f"So other allocations took at least {format_rounded(taken, slack)} while it slept."
            )
    return sentences


def _failed_cycle(facts: dict[str, Fact], phase: str) -> list[str]:
    """Return the sentence about the cycle in which the failure happened, if the log shows it."""
    cycle = number_of(facts, "sleep_cycles")
    step = number_of(facts, "trainer_step")
    finished = number_of(facts, "trainer_finished_step")
    if step is None and finished is not None:
        step = finished + 1
    where = ""
    if step is not None:
        where = f", in step {step:.0f}"
    if cycle is None:
        if step is None:
            return []
        return [f"It failed in step {step:.0f}."]
    if phase == "wake_up":
        return [f"It failed after sleep {cycle:.0f} of this log{where}."]
    if _is(facts, "asleep"):
        return [f"It failed during sleep {cycle:.0f} of this log{where}."]
    return [f"It failed after the engine woke up from sleep {cycle:.0f} of this log{where}."]


def _holder(facts: dict[str, Fact]) -> list[str]:
    """Return the sentence about the process that has the memory, if it has a size."""
    size = number_of(facts, "device_holder_bytes")
    if size is None:
        return []
    held = format_gib(size)
    kind = str(facts["device_holder"].value)
    if kind in {"engine", "other"}:  # the rule names it
        return []
    if kind == "rollout":
        return [f"{held} of the device was in use when the trainer wanted its memory back."]
    allocated = number_of(facts, "trainer_allocated_bytes")
    if allocated is None:
        return [f"The trainer had reserved {held}."]
    return [f"The trainer had reserved {held}, of which tensors used {format_gib(allocated)}."]


def _first_residue(facts: dict[str, Fact]) -> list[str]:
    """Return the sentence about the first sleep after which clearly more stayed in use, if any."""
    if _is(facts, "residue_grows"):
        return [f"More stays in use after each sleep: {facts['sleep_used_each'].value} GiB."]
    cycle = number_of(facts, "sleep_residue_cycle")
    used = number_of(facts, "sleep_residue_used_bytes")
    least = number_of(facts, "sleep_least_used_bytes")
    if cycle is None or used is None or least is None:
        return []
    instead = ""
    if used > least:
        instead = f" instead of {format_gib(least)}"
    stayed = f"{format_gib(used)} stayed in use{instead}"
    if _is(facts, "sleep_kept_by_engine"):
        return [
            f"Sleep {cycle:.0f} was the first that did not release the engine's memory: {stayed}."
        ]
    who = "another program"
    if "device_holder" in facts and facts["device_holder"].value == "trainer":
        who = "the trainer"
    return [f"Since sleep {cycle:.0f} {who} uses more: {stayed}."]


def _is(facts: dict[str, Fact], name: str) -> bool:
    return name in facts and facts[name].value is True


def _size(fact: Fact) -> str:
    return format_rounded(float(fact.value), fact.slack)
