"""Define the kinds of failure, and the frozen records from an observed incident to a plan.

Each step returns a copy with more fields filled in (``dataclasses.replace``).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.facts import Fact, FactValue, number_of
from oomguard.core.records import Record, ShownRecord, shown
from oomguard.core.text import PLACEHOLDER, first_known, is_known

if TYPE_CHECKING:
    from oomguard.core.measurements import Snapshot

# What an allocator prints, most informative first: the request with free memory, the request with
# used memory, the request alone.
_ALLOCATION: Final = (
    "{tried_bytes:GiB} requested, {device_free_bytes:GiB} of {device_total_bytes:GiB} free",
    (
        "{tried_bytes:GiB} requested, {process_in_use_bytes|allocated_bytes:GiB} of "
        "{device_total_bytes:GiB} in use"
    ),
    "{tried_bytes:GiB} requested, {device_free_bytes:GiB} free",
    "{tried_bytes:GiB} requested",
    "the process holds {process_in_use_bytes:GiB}",
)


def _allocator(what: str) -> tuple[str, ...]:
    return (*(f"{what}: {figures}" for figures in _ALLOCATION), what)


# Kind -> templates. oomguard uses the first template whose facts are all known. The last template
# of a kind needs no facts; a kind without templates is shown by its name.
_HEADLINES: Final[dict[str, tuple[str, ...]]] = {
    "cuda_oom": _allocator("CUDA out of memory"),
    "hip_oom": _allocator("HIP out of memory"),
    "xpu_oom": _allocator("XPU out of memory"),
    "npu_oom": _allocator("NPU out of memory"),
    "mps_oom": _allocator("MPS out of memory"),
    "xla_oom": _allocator("XLA out of memory"),
    "cublas_alloc": _allocator("cuBLAS could not get memory for its handle or workspace"),
    "nccl_oom": _allocator("NCCL could not get memory"),
    "kv_cache_none_left": (
        (
            "No memory is left for the KV cache: everything else needs "
            "{kv_cache_available_bytes:excess} more than utilization "
            "{gpu_memory_utilization_ratio} allows"
        ),
        (
            "No memory is left for the KV cache: everything else needs "
            "{kv_cache_available_bytes:excess} too much"
        ),
        "No memory is left for the KV cache",
    ),
    "kv_cache_too_small_for_max_len": (
        (
            "One request of {max_model_len_tokens:count} tokens needs {kv_cache_needed_bytes:GiB} "
            "of KV cache, but {kv_cache_pool_bytes|kv_cache_available_bytes:GiB} is available"
        ),
        (
            "One request needs {kv_cache_needed_bytes:GiB} of KV cache, "
            "but {kv_cache_pool_bytes|kv_cache_available_bytes:GiB} is available"
        ),
        (
            "One request of {max_model_len_tokens:count} tokens does not fit in the KV cache, "
            "which holds {kv_cache_capacity_tokens:count} tokens"
        ),
        "One request of the full length does not fit in the KV cache",
    ),
    "startup_free_memory_below_utilization": (
        (
            "vLLM wants {desired_bytes:GiB} at start-up, but {device_free_bytes:GiB} of "
            "{device_total_bytes:GiB} is free"
        ),
        "vLLM wants more memory at start-up than is free",
    ),
    "sampler_warmup_oom": (
        "Memory ran out while warming up the sampler with {max_num_seqs} sequences",
        *_allocator("Memory ran out while warming up the sampler"),
    ),
    "pooler_warmup_oom": (
        "Memory ran out while warming up the pooler with {max_num_seqs} sequences",
        *_allocator("Memory ran out while warming up the pooler"),
    ),
    "cudagraph_capture_oom": _allocator("Memory ran out while capturing CUDA graphs"),
    "memory_profiling_changed": (
        (
            "Free memory changed while vLLM was measuring: {initial_free_bytes:GiB} before, "
            "{current_free_bytes:GiB} after"
        ),
        "Free memory changed while vLLM was measuring",
    ),
    "cpu_node_memory": (
        (
            "No memory is left for the KV cache: everything else needs "
            "{kv_cache_available_bytes:excess} more than the {desired_bytes:GiB} that the "
            "utilization allows"
        ),
        (
            "vLLM wants {desired_bytes:GiB} of the node's memory at start-up, but "
            "{device_free_bytes:GiB} "
            "of {device_total_bytes:GiB} is free"
        ),
        (
            "A KV cache of {kv_cache_requested_bytes:GiB} was requested, but "
            "{device_free_bytes:GiB} of "
            "{device_total_bytes:GiB} is free"
        ),
        "The node's memory is too small for what vLLM asks for",
    ),
    "mamba_cache_blocks": (
        "Too few Mamba cache blocks for {max_num_seqs} sequences",
        "Too few Mamba cache blocks",
    ),
    "encoder_budget": ("One item needs more encoder tokens than the budget allows",),
    "kv_slots_exhausted": (
        (
            "Too few places in the table of requests: {request_slots_needed} requested, "
            "{request_slots_free} free"
        ),
        "No KV cache slot is left for a request",
    ),
    "llamacpp_oom": (*_allocator("{framework} ran out of memory"), "llama.cpp ran out of memory"),
    "host_oom": (
        (
            "Stopped before host memory ran out: {host_available_bytes:GiB} of the limit of "
            "{host_limit_bytes:GiB} was left, the reserve is {host_reserve_bytes:GiB}"
        ),
        (
            "Stopped before host memory ran out: {host_available_bytes:GiB} of "
            "{host_total_bytes:GiB} was left, the reserve is {host_reserve_bytes:GiB}"
        ),
        "Host memory ran out: {host_used_bytes:GiB} of {host_total_bytes:GiB} in use",
        (
            "Host memory ran out: {host_victim} had {host_victim_bytes:GiB}, the limit was "
            "{host_limit_bytes:GiB}"
        ),
        "Host memory ran out: the limit was {host_limit_bytes:GiB}",
        "Too little host memory: {tried_bytes:GiB} requested, {host_available_bytes:GiB} available",
        "Host memory ran out: {tried_bytes:GiB} requested",
        "Host memory ran out: {host_victim} was ended with {host_victim_bytes:GiB}",
        "Host memory ran out: {host_victim} was ended",
        "The host ran out of memory",
    ),
    "engine_dead": (
        "The engine died: {engine_error}",
        "A process of the engine was killed by {exit_signal:signal}",
        "The engine died, and this text does not show why",
    ),
    "other": (),
}
KINDS: Final = tuple(_HEADLINES)
# Free memory rose, a token budget is too small, or the text shows no cause. oomguard reports these
# kinds, but no process ran out of memory.
NOT_OOM_KINDS: Final = frozenset({"memory_profiling_changed", "encoder_budget", "engine_dead"})
# Of these kinds, a change of settings can still cure some.
CURABLE_KINDS: Final = frozenset(KINDS) - NOT_OOM_KINDS | {"encoder_budget"}


def headline(kind: str, facts: Mapping[str, Fact]) -> str:
    """Return one sentence that says what happened, with the known figures.

    Args:
        kind: one of ``KINDS``; any other kind is shown by its name.
        facts: the printed facts of the failure.
    """
    return first_known(_HEADLINES.get(kind, ()), facts) or kind.replace("_", " ")


def facts_of_headline(kind: str, facts: Mapping[str, Fact]) -> list[str]:
    """Return the names of the facts whose figures the headline shows, in its order."""
    template = next((text for text in _HEADLINES.get(kind, ()) if is_known(text, facts)), "")
    names: list[str] = []
    for found in PLACEHOLDER.finditer(template):
        names += [name for name in found.group(1).split("|") if name in facts][:1]
    return names


# What would decide a failure whose cause the text leaves open: one thing, and the command that
# shows it.


@dataclass(frozen=True, slots=True, repr=False)
class Missing(Record):
    """Name one thing that would decide an open cause, and the command that shows it."""

    what: str
    command: str


CAUSES: Final = (
    "colocated_process",
    "weights_do_not_fit",
    "kv_cache_budget",
    "kv_blocks_override",
    "max_model_len_too_large",
    "max_new_tokens_or_context_too_long",
    "batch_too_large",
    "cuda_graphs",
    "speculative_decoding",
    "prefix_caching",
    "prompt_logprobs",
    "multimodal_profile",
    "sampler_warmup_max_num_seqs",
    "fragmentation",
    "leaked_or_unreleased_memory",
    "utilization_too_high",
    "utilization_too_low",
    "tensor_parallel_imbalance",
    "quantization_missing",
    "lora",
    "training",
    "host_ram",
    "sleep_wake",
    "illegal_instruction",
    "native_crash",
    "not_memory",
    "unknown",
)
# The source of a setting that an earlier attempt changed.
PATCHED: Final = "patched"
PHASES: Final = (
    "load_weights",
    "profile_run",
    "kv_cache_init",
    "cudagraph_capture",
    "prefill",
    "decode",
    "sampling_logits",
    "prompt_logprobs",
    "generate",
    "wake_up",
    "training",
    "unknown",
)
_STARTING: Final = frozenset({"load_weights", "profile_run", "kv_cache_init", "cudagraph_capture"})
# fails before the first of these phases
_START_CHECK: Final = "startup_free_memory_below_utilization"


class Effect(enum.IntEnum):
    """Rank what a patch costs the user, in rising order.

    ``str`` gives the spelling of the command line and of JSON.

        >>> str(Effect.REDUCES_CAPACITY)
        'reduces-capacity'
    """

    OUTPUT_PRESERVING = 1
    REDUCES_CAPACITY = 2
    CHANGES_OUTPUTS = 3

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")

    @classmethod
    def parse(cls, text: str) -> Effect:
        """Read an effect such as ``reduces-capacity``.

        Raises:
            KeyError: if the text is not an effect.
        """
        return {str(effect): effect for effect in cls}[text]


@dataclass(frozen=True, slots=True, repr=False)
class Location(Record):
    """Locate the start of an incident.

    Attributes:
        line: the line, from 1; None if unknown.
        byte: the byte offset, from 0; None if unknown.
        process: the process that the line's prefix names; None if it names none.
    """

    line: int | None = None
    byte: int | None = None
    process: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Evidence(Record):
    """Quote a line as printed; ``line`` is None if the fact was not read from a line."""

    text: str
    line: int | None = None

    def __str__(self) -> str:
        text = shown(self.text)
        if self.line is None:
            return text
        return f"line {self.line}: {text}"


@dataclass(frozen=True, slots=True, repr=False)
class SettingInForce(Record):
    """Describe one setting of the failed run.

    ``set_by_user`` is None if the log does not distinguish a default from a user's choice.
    """

    name: str
    value: FactValue | None
    set_by_user: bool | None
    source: str


@dataclass(frozen=True, slots=True, repr=False)
class Cause(Record):
    """Explain why memory ran out, according to one rule.

    ``confidence`` is between 0 and 1. ``confirm`` says how a person can check the cause.
    """

    id: str
    rule: str
    confidence: float
    evidence: tuple[Evidence, ...]
    explanation: str
    title: str = ""
    confirm: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Patch(Record):
    """Change one setting from ``old`` to ``new``.

    Attributes:
        new: the value to set; None if oomguard could not compute it. ``reason`` then names the
            missing number.
        predicted_freed_bytes: bytes that the change should free; None if unknown.
        predicts: the values of facts that the next attempt should measure.
        blocked_by: why the policy does not permit the patch; None if it is permitted.
        group: patches of one group are applied together, because one alone is not enough.
        permitted_by: what permitted an applied patch: the default, or an option; None if the patch
            was not applied.
    """

    setting: str
    old: FactValue | None
    new: FactValue | None
    effect: Effect
    reason: str
    rule: str = ""
    as_flag: str | None = None
    as_kwarg: str | None = None
    as_env: str | None = None
    predicted_freed_bytes: int | None = None
    predicts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    tradeoff: str = ""
    blocked_by: str | None = None
    group: int | None = None
    permitted_by: str | None = field(default=None, compare=False)

    @property
    def applicable(self) -> bool:
        """Whether oomguard may apply this patch automatically."""
        return self.new is not None and self.blocked_by is None

    @property
    def change(self) -> str:
        """The change as ``40960 -> 26624``, with byte counts as the engine gets them."""
        if self.old is None:
            return str(self.new)
        return f"{self.old} -> {self.new}"


@dataclass(frozen=True, slots=True, repr=False)
class Action(Record):
    """Name one thing to do about a failure: change a setting, or act outside oomguard.

    Attributes:
        id: a setting's canonical name, or the name of an action such as ``end_other_process``.
        title: what to do, in one line.
        direction: ``up``, ``down``, ``on``, ``off``, or None if the action has no direction.
        old: the setting's present value; None if unknown.
        new: the value to set; None if oomguard could not compute it. ``why`` then names the missing
            number.
        effect: what it costs the user; None for an action outside oomguard.
        applicability: ``automatic``, ``needs-permission``, ``needs-value`` or ``manual``.
        command: the text to paste; None if there is no such text.
        why: why it helps, with the known numbers.
        frees_bytes: bytes that it should free; None if unknown.
        rule: the code of the rule that proposes it; "" if the table of actions proposes it.
        cost: what it costs, in words.
        blocked_by: why oomguard needs permission for it; None if it does not.
    """

    id: str
    title: str
    direction: str | None = None
    old: FactValue | None = None
    new: FactValue | None = None
    effect: Effect | None = None
    applicability: str = "manual"
    command: str | None = None
    why: str = ""
    frees_bytes: int | None = None
    rule: str = ""
    cost: str = ""
    blocked_by: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Alternative(Record):
    """Offer a change that keeps the setting of the plan; ``why_not`` says why the plan differs."""

    setting: str
    new: FactValue | None
    why_not: str
    as_flag: str | None = None
    as_kwarg: str | None = None
    tradeoff: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class BudgetPart(Record):
    """Hold one part of the device's bytes.

    ``source`` is ``printed``, ``solved`` or ``measured``.
    """

    name: str
    bytes: int
    source: str = "printed"


@dataclass(frozen=True, slots=True, repr=False)
class Budget(Record):
    """Account for the device's bytes, as far as they are known.

    The parts do not overlap, and together they are not larger than the device. ``conflict`` names
    printed numbers that contradict each other; oomguard leaves their parts out.
    """

    device_total_bytes: int | None = None
    parts: tuple[BudgetPart, ...] = ()
    conflict: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Incident(Record):
    """Describe one memory failure, and after diagnosis its causes and actions.

    Attributes:
        settings_complete: whether ``settings`` lists every setting that the user set.
        start: the number of the engine's start in this input, from 1.
        also_in: other processes that printed the same failure.
        wrappers: lines of parent processes that only passed the failure on.
        certainty_ratio: the probability that an unknown wording reports a failure; None if a
            signature matched.
        missing: what would decide an unknown cause; None if the cause is known.
    """

    kind: str
    message: str
    framework: str = "unknown"
    framework_version: str | None = None
    phase: str = "unknown"
    location: Location = field(default_factory=Location)
    repeated: int = 1
    facts: Mapping[str, Fact] = field(default_factory=lambda: MappingProxyType({}))
    settings: Mapping[str, SettingInForce] = field(default_factory=lambda: MappingProxyType({}))
    settings_complete: bool = False
    evidence: tuple[Evidence, ...] = ()
    causes: tuple[Cause, ...] = ()
    plan: tuple[Patch, ...] = ()
    actions: tuple[Action, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    budget: Budget = field(default_factory=Budget)
    unknown: tuple[str, ...] = ()
    start: int = 1
    also_in: tuple[str, ...] = ()
    wrappers: tuple[Evidence, ...] = ()
    certainty_ratio: float | None = None
    missing: Missing | None = None

    def is_of_next_start(self, earlier: Incident) -> bool:
        """Return whether the engine failed to start, and this is the same again in a later start.

        Free memory that lacks under the same share is not: the earlier process may still hold it.
        """
        if not (self.is_at_start and earlier.is_at_start):
            return False
        share = "gpu_memory_utilization_ratio"
        is_leftover = self.kind == "startup_free_memory_below_utilization"
        if is_leftover and self.number(share) == earlier.number(share):
            return False
        model, known = self.facts.get("model"), earlier.facts.get("model")
        if model is not None and known is not None and model.value != known.value:
            return False
        name, _, pid = (self.location.process or "").partition(" pid=")
        known_name, _, known_pid = (earlier.location.process or "").partition(" pid=")
        if pid and known_pid:
            return name == known_name and pid != known_pid
        return self.start > earlier.start

    @property
    def is_oom(self) -> bool:
        """Whether memory ran short and therefore a process or request failed."""
        return self.kind not in NOT_OOM_KINDS

    @property
    def is_at_start(self) -> bool:
        """Whether the failure happened while an engine started."""
        return (
            self.phase in _STARTING
            or self.kind == _START_CHECK
            or self.kind.endswith("_warmup_oom")
        )

    @property
    def headline(self) -> str:
        """One sentence that says what happened, with the known figures."""
        return headline(self.kind, self.facts)

    def number(self, name: str) -> float | None:
        """Return the value of a numeric fact, in the unit of its name; None if unknown."""
        return number_of(self.facts, name)

    def slack(self, name: str) -> float:
        """Return half of a fact's last printed digit, in its unit; 0 if exact or unknown."""
        fact = self.facts.get(name)
        if fact:
            return fact.slack
        return 0.0


@dataclass(frozen=True, slots=True, repr=False)
class Attempt(Record):
    """Describe one run under one group of settings.

    Attributes:
        settings: everything that oomguard has changed so far.
        patches: the changes that are new in this attempt.
        exit_status: the command's exit status; None for a call inside the process.
        error: the failure of such a call; "" if it succeeded.
        measured: the values of facts that this attempt measured.
        ranks: how each rank of a job ended the attempt; None without other ranks.
    """

    number: int
    settings: Mapping[str, FactValue]
    patches: tuple[Patch, ...] = ()
    incident: Incident | None = None
    exit_status: int | None = None
    error: str = ""
    seconds: float = 0.0
    measured: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    ranks: Mapping[str, Any] | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the attempt ended without a failure."""
        return self.incident is None and not self.error and self.exit_status in {None, 0}

    def __str__(self) -> str:
        """Return the attempt in one line; its ``repr`` has every field."""
        outcome = self.error
        if self.succeeded:
            outcome = "succeeded"
        elif self.incident is not None:
            outcome = f"failed: {self.incident.kind}"
        elif not outcome:
            outcome = f"failed with exit status {self.exit_status}"
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        texts = [f"attempt {self.number}", settings, outcome, f"{self.seconds:.1f} s"]
        return shown(", ".join(filter(None, texts)))


@dataclass(frozen=True, slots=True, repr=False)
class EngineStart(Record):
    """Describe one engine start, failed or not: version, settings and memory."""

    number: int
    framework: str = "unknown"
    framework_version: str | None = None
    line: int | None = None
    facts: Mapping[str, Fact] = field(default_factory=lambda: MappingProxyType({}))
    settings: Mapping[str, SettingInForce] = field(default_factory=lambda: MappingProxyType({}))
    settings_complete: bool = False
    budget: Budget = field(default_factory=Budget)


# The note on an input without any bytes.
EMPTY: Final = "empty"


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis(ShownRecord):
    """Hold everything that oomguard found in one input, in the order of time.

    Attributes:
        source: the path as given.
        snapshot: the content of a memory snapshot; None for a log.
        command: the command that started the engine, if the log shows it; "" otherwise.

        >>> oomguard.diagnose(path="error.log").verdict
        'oom'
    """

    source: str
    incidents: tuple[Incident, ...] = ()
    notes: tuple[str, ...] = ()
    starts: tuple[EngineStart, ...] = ()
    snapshot: Snapshot | None = None
    command: str = ""

    def _repr_html_(self) -> str:
        """Return the diagnosis as HTML for a notebook cell.

        Records cannot import ``report``, so this asks the package's public module (see records.py).
        """
        import oomguard

        return str(oomguard.notebook_html(self))

    @property
    def without_failure(self) -> str:
        """The sentence to print for an input without failures."""
        if EMPTY in self.notes:
            return EMPTY
        return "no memory failure found"

    @property
    def verdict(self) -> str:
        """``oom`` if any incident is an out-of-memory failure, otherwise ``no_oom``."""
        if any(incident.is_oom for incident in self.incidents):
            return "oom"
        return "no_oom"

    @property
    def first_cause(self) -> Incident | None:
        """The incident to act on: the first out-of-memory failure, otherwise the first incident.

        If the user started the engine again and it failed again, the last start decides. None if
        there are no incidents.
        """
        first: Incident | None = None
        for incident in self.incidents:
            if incident.is_oom and (first is None or incident.is_of_next_start(first)):
                first = incident
        if first is not None:
            return first
        if self.incidents:
            return self.incidents[0]
        return None
