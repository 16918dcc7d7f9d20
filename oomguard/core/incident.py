"""The frozen records that travel along the flow: an incident is observed, explained, planned for
and shown.

Each step returns a copy with more filled in (``dataclasses.replace``); nothing is changed in place.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.facts import Fact, FactValue, number_of
from oomguard.core.kinds import NOT_OOM_KINDS, headline
from oomguard.core.records import Record, shown

if TYPE_CHECKING:
    from oomguard.core.snapshot_records import Snapshot


# What would decide a failure whose cause the text leaves open: one thing, and the command that
# shows it.


@dataclass(frozen=True, slots=True, repr=False)
class Missing(Record):
    """One thing to find out; ``command`` shows it, and stands as it is pasted."""

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
_START_CHECK: Final = "startup_free_memory_below_utilization"  # before the first of these phases


class Effect(enum.IntEnum):
    """What a patch costs the user, in rising order; ``str`` gives the form of the command line and
    JSON.
    """

    OUTPUT_PRESERVING = 1
    REDUCES_CAPACITY = 2
    CHANGES_OUTPUTS = 3

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")

    @classmethod
    def parse(cls, text: str) -> Effect:
        """Read ``reduces-capacity`` and its like; raises KeyError for any other text."""
        return {str(effect): effect for effect in cls}[text]


@dataclass(frozen=True, slots=True, repr=False)
class Location(Record):
    """Where an incident starts: 1-based line, 0-based byte, and the process that the line's prefix
    names.
    """

    line: int | None = None
    byte: int | None = None
    process: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Evidence(Record):
    """A line as it was printed; ``line`` is its number, None for a fact that was read
    from no line.
    """

    text: str
    line: int | None = None

    def __str__(self) -> str:
        text = shown(self.text)
        if self.line is None:
            return text
        return f"line {self.line}: {text}"


@dataclass(frozen=True, slots=True, repr=False)
class SettingInForce(Record):
    """One setting of the failed run; ``set_by_user`` is None if nothing tells a default from a
    choice.
    """

    name: str
    value: FactValue | None
    set_by_user: bool | None
    source: str


@dataclass(frozen=True, slots=True, repr=False)
class Cause(Record):
    """Why memory ran out, by one rule; ``confidence`` is 0 to 1, ``confirm`` says how a person can
    check it.
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
    """One setting, old to new. ``new`` is None if it could not be solved; ``reason`` then names
    what is missing.

    ``blocked_by`` says why the policy does not permit it (None: permitted). Patches of one
    ``group`` are applied
    together: none of them is enough alone. ``predicts`` maps facts to the values that the next
        attempt should measure.
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

    @property
    def applicable(self) -> bool:
        """Whether oomguard may apply this patch by itself."""
        return self.new is not None and self.blocked_by is None


@dataclass(frozen=True, slots=True, repr=False)
class Action(Record):
    """One thing to do about a failure: change a setting, or do something outside oomguard.

    Attributes:
        id: a setting's canonical name, or the name of an action outside (``end_other_process``).
        title: what to do, in one line.
        direction: ``up``, ``down``, ``on``, ``off``, or None if the action has none.
        old: the setting's present value, None if it is not known.
        new: the value to set, None if it could not be computed; ``why`` then says which number is
            missing.
        effect: what it costs the user, None for an action outside.
        applicability: ``automatic``, ``needs-permission``, ``needs-value`` or ``manual``.
        command: what to paste, None if nothing can be pasted.
        why: why it helps, with the numbers that are known.
        frees_bytes: what it is predicted to free, None if that is not known.
        rule: the code of the rule that proposes it, "" for the table of actions.
        cost: what it costs, in words.
        blocked_by: why oomguard does not apply it without permission, None if it may.
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
    """A way that keeps what the plan changes; ``why_not`` says why the plan does not take it."""

    setting: str
    new: FactValue | None
    why_not: str
    as_flag: str | None = None
    as_kwarg: str | None = None
    tradeoff: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class BudgetPart(Record):
    """One part of the device's bytes; ``source`` is ``printed``, ``solved`` or ``measured``."""

    name: str
    bytes: int
    source: str = "printed"


@dataclass(frozen=True, slots=True, repr=False)
class Budget(Record):
    """Where the device's bytes went, as far as is known: parts that do not overlap and that the
    device can hold.

    ``conflict`` names printed numbers that contradict each other; their parts are left out.
    """

    device_total_bytes: int | None = None
    parts: tuple[BudgetPart, ...] = ()
    conflict: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Incident(Record):
    """One memory failure: what was printed, and, once diagnosed and planned, why it happened and
    what to do.

    ``settings_complete`` says that ``settings`` lists all that the user set, so that any other was
    left alone. ``start`` counts the engine's starts within one input, ``also_in`` names the other
    processes that printed the same failure, ``wrappers`` are the lines of parents that only passed
    it on. ``certainty_ratio`` is how sure it is that a message of a new wording tells a failure;
    None: its wording is known. ``missing`` is what would decide an unknown cause.
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

    @property
    def is_oom(self) -> bool:
        """Whether memory ran short and a process or request failed for it."""
        return self.kind not in NOT_OOM_KINDS

    @property
    def is_at_start(self) -> bool:
        """Whether it failed while an engine started."""
        return (
            self.phase in _STARTING
            or self.kind == _START_CHECK
            or self.kind.endswith("_warmup_oom")
        )

    @property
    def headline(self) -> str:
        """What happened, in one sentence with the figures that are known."""
        return headline(self.kind, self.facts)

    def number(self, name: str) -> float | None:
        """Return the value of a numeric fact, in the unit of its name; None if unknown (unknown is
        never zero).
        """
        return number_of(self.facts, name)

    def slack(self, name: str) -> float:
        """Return half of the last printed digit of a fact, in its own unit; 0 if it is exact or
        unknown.
        """
        fact = self.facts.get(name)
        if fact:
            return fact.slack
        return 0.0


@dataclass(frozen=True, slots=True, repr=False)
class Attempt(Record):
    """One run under one group of settings: ``settings`` is all that oomguard changed so far,
    ``patches`` what is new.

    ``measured`` maps facts to what this attempt showed. ``exit_status`` is None for a call inside
    the process, whose failure is ``error`` ("" for success). ``ranks`` tells how each rank of a job
    ended it; None where no others were met.
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


@dataclass(frozen=True, slots=True, repr=False)
class EngineStart(Record):
    """What one engine start printed of itself, failed or not: version, settings, and where the
    bytes went.
    """

    number: int
    framework: str = "unknown"
    framework_version: str | None = None
    line: int | None = None
    facts: Mapping[str, Fact] = field(default_factory=lambda: MappingProxyType({}))
    settings: Mapping[str, SettingInForce] = field(default_factory=lambda: MappingProxyType({}))
    settings_complete: bool = False
    budget: Budget = field(default_factory=Budget)


# The note on an input that has no bytes.
EMPTY: Final = "empty"


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis(Record):
    """All that was found in one input, in the order of time; ``source`` is the path as given,
    ``snapshot`` what a memory snapshot holds.
    """

    source: str
    incidents: tuple[Incident, ...] = ()
    notes: tuple[str, ...] = ()
    starts: tuple[EngineStart, ...] = ()
    snapshot: Snapshot | None = None

    def _repr_html_(self) -> str:
        """Return the diagnosis for a notebook's cell; a record knows no drawing, and asks the
        package's public face (records.py).
        """
        import oomguard

        return str(oomguard.notebook_html(self))

    @property
    def without_failure(self) -> str:
        """What to say of an input in which nothing failed."""
        if EMPTY in self.notes:
            return EMPTY
        return "no memory failure found"

    @property
    def verdict(self) -> str:
        """``oom`` when any incident is one, else ``no_oom``."""
        if any(incident.is_oom for incident in self.incidents):
            return "oom"
        return "no_oom"

    @property
    def first_cause(self) -> Incident | None:
        """The incident to act on: the first in time that is an out-of-memory, else the first of
        all, else None.
        """
        for incident in self.incidents:
            if incident.is_oom:
                return incident
        if self.incidents:
            return self.incidents[0]
        return None
