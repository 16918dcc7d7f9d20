"""Identify vLLM's failed allocation by its bytes, and add the host's free memory if local."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.errors import OomguardError
from oomguard.core.facts import GIB, MIB, Fact, FactValue
from oomguard.core.files import read_tables
from oomguard.core.incident import Incident
from oomguard.core.settings import value_in_force

if TYPE_CHECKING:
    from oomguard.estimate.model.files import Parameter
    from oomguard.estimate.model.shape import ModelShape
    from oomguard.estimate.start.failed_start import FailedStart
    from oomguard.estimate.start.start import VllmSettings


# An exact byte count that is a product of settings and the model's numbers is rarely a coincidence;
# a rounded number may be. The confidence depends on how many other products would also have
# matched.

_FILE: Final = Path(__file__).with_name("allocations.toml")
_DTYPE: Final = "dtype"
# vLLM pads the vocabulary to multiples of this.
_VOCABULARY_MULTIPLE: Final = 64
# torch's caching allocator requests multiples of this from the device and prints the request.
_GRANULE_BYTES: Final = 2 * MIB
# With more accidental matches than this, a match means nothing.
_MOST_BY_CHANCE: Final = 0.5
# A size whose odd part is not well above this is too round as evidence, unless it is unusually
# large.
_ROUND_BELOW: Final = 4
# The engine's phase agrees by chance at most this often.
_PHASE_AGREES: Final = 0.25
MOST_SURE: Final = 0.99
_FLOAT32_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Allocation:
    """Describe one row of the data file: a single allocation of vLLM.

    The data file explains the keys.
    """

    name: str
    what: str
    factors: tuple[tuple[str, ...], ...]
    up_to: tuple[str, ...]
    follows: Mapping[str, list[str]]
    element: tuple[Any, ...]
    together: int | None
    times: int
    phases: frozenset[str]
    only_on_host: bool
    told_by: frozenset[str]
    levers: Mapping[str, Mapping[str, Any]]
    needs: str | None
    of_request: bool
    only_there: bool
    source: str


@dataclass(frozen=True, slots=True)
class Product:
    """Describe a product that equals the requested bytes.

    Attributes:
        allocation: its row in the data file.
        numbers: its factors by name, the free one as ``tokens``.
        element_bytes: bytes per element.
    """

    allocation: Allocation
    numbers: Mapping[str, int]
    element_bytes: int

    @property
    def bytes(self) -> int:
        """Return the bytes of the tensor."""
        return self.allocation.times * math.prod(self.numbers.values()) * self.element_bytes

    def __str__(self) -> str:
        named = " x ".join(f"{value} {name}" for name, value in self.numbers.items())
        if self.allocation.times > 1:
            times = f"{self.allocation.times} x "
        else:
            times = ""
        return f"{times}{named} x {self.element_bytes} bytes"


@dataclass(frozen=True, slots=True)
class Named:
    """Hold the allocation that matches the bytes, and its confidence from 0 to 0.99."""

    product: Product
    sure: float


@dataclass(slots=True)
class _Search:
    """Hold the request and its matches.

    ``chance`` is the number of products that match a random size of this magnitude. A round size
    matches by chance anyway, because settings and widths are mostly powers of two.
    """

    tried_bytes: int
    slack_bytes: float
    numbers: Mapping[str, int]
    phase: str = "unknown"
    found: list[Product] = field(default_factory=list)
    chance: float = 0.0

    @property
    def window_bytes(self) -> float:
        """Return the number of sizes that would be printed as this one."""
        if not self.slack_bytes:
            return 1.0
        return 2 * self.slack_bytes + _GRANULE_BYTES

    def by_chance(self, product: Product) -> float:
        """Return the expected number of accidental matches of this product's size.

        It is lower if the engine's phase is the one that makes the allocation.
        """
        size = product.bytes
        odd = size // (size & -size)
        if self.phase in product.allocation.phases:
            agrees = _PHASE_AGREES
        else:
            agrees = 1.0
        return max(self.chance, min(1.0, _ROUND_BELOW / odd) * min(1.0, GIB / size) * agrees)

    def is_it(self, size: float) -> bool:
        """Return whether a tensor of this size would be printed like the request."""
        if not self.slack_bytes:
            return size == self.tried_bytes
        return (
            self.tried_bytes - self.slack_bytes - _GRANULE_BYTES
            <= size
            <= self.tried_bytes + self.slack_bytes
        )


@cache
def allocations() -> tuple[Allocation, ...]:
    """Return the rows of the data file."""
    rows = next(iter(read_tables("allocations", [_FILE]).values()))["allocation"]
    found = []
    for row in rows:
        found.append(
            Allocation(
                row["name"],
                row["what"],
                tuple((one,) if isinstance(one, str) else tuple(one) for one in row["factors"]),
                tuple(row.get("up_to", ())),
                row.get("follows", {}),
                tuple(row["element"]),
                row.get("together"),
                row.get("times", 1),
                frozenset(row["phases"]),
                row.get("on") == "host",
                frozenset(row.get("told_by", ())),
                row.get("levers", {}),
                row.get("needs"),
                row.get("of_request", False),
                row.get("only_there", False),
                row["source"],
            )
        )
    return tuple(found)


def name_allocation(
    tried_bytes: int,
    slack_bytes: float,
    numbers: Mapping[str, int],
    phase: str = "unknown",
    *,
    on_host: bool = True,
) -> Named | None:
    """Return the one allocation with the requested bytes, or None if none or too many match.

    Args:
        tried_bytes: the bytes of the failed allocation.
        slack_bytes: half of its last printed digit; 0 if the bytes are exact.
        numbers: the effective settings and the model's numbers by name; ``ranks`` for the ranks
            that share a matrix.
        phase: the engine's phase; it decides between rows with the same bytes.
        on_host: whether the host's memory ran out; host-only allocations are never matched for a
            device.
    """
    search = _Search(tried_bytes, slack_bytes, numbers, phase)
    for row in allocations():
        is_there = not row.only_there or phase in row.phases
        if (
            is_there
            and (row.needs is None or row.needs in numbers)
            and (on_host or not row.only_on_host)
        ):
            _try(row, search)
    there = []
    for product in search.found:
        if phase in product.allocation.phases:
            there.append(product)
    # A log can show the wrong phase, so without a match every phase counts.
    there = there or search.found
    chance = max((search.by_chance(product) for product in there), default=1.0)
    if not there or chance > _MOST_BY_CHANCE:
        return None
    # The first matching row of the file wins. Each other matching name halves the confidence.
    names = {product.allocation.name for product in there}
    return Named(there[0], min(MOST_SURE, 1 / len(names) / (1 + chance)))


def allocation_from_traceback(
    tried_bytes: float, numbers: Mapping[str, int], evidence: Collection[str]
) -> Product | None:
    """Return the allocation by the kind of failure or the traceback's location, or None.

    A free factor gets the number nearest to the bytes, in float32.
    """
    row = _first_told_by(evidence)
    if row is None or not all(names[0] in numbers for names in row.factors):
        return None
    known = {names[0]: numbers[names[0]] for names in row.factors}
    if not row.up_to:
        return Product(row, known, _FLOAT32_BYTES)
    most = _most(row, numbers)
    if most is None:
        return None
    nearest = round(tried_bytes / (math.prod(known.values()) * _FLOAT32_BYTES))
    return Product(row, {"tokens": max(1, min(nearest, most)), **known}, _FLOAT32_BYTES)


def _first_told_by(evidence: Collection[str]) -> Allocation | None:
    for row in allocations():
        if not row.told_by.isdisjoint(evidence):
            return row
    return None


def _most(row: Allocation, numbers: Mapping[str, int]) -> int | None:
    """Return the largest value of a row's free factor; None if its setting is unknown."""
    if row.up_to[0] not in numbers:
        return None
    limits = []
    for name in row.up_to:
        if name in numbers:
            limits.append(numbers[name])
    return min(limits)


def _try(row: Allocation, search: _Search) -> None:
    dtype = search.numbers.get(_DTYPE)
    elements: list[int] = []
    for each in row.element:
        size = dtype if each == _DTYPE else each
        if size and size not in elements:
            elements.append(size)
    for names in itertools.product(*row.factors):
        if not set(names) <= search.numbers.keys():
            continue
        for values in itertools.product(*(_values(name, search.numbers) for name in names)):
            unit = row.times * math.prod(values)
            for element in elements:
                known = dict(zip(names, values, strict=True))
                _match(row, known, unit * element, element, search)


def _match(
    row: Allocation, known: dict[str, int], unit_bytes: int, element: int, search: _Search
) -> None:
    """Add the product if it has the requested bytes.

    With a free factor it also matches a whole number of units.
    """
    if not row.up_to:
        search.chance += search.window_bytes / search.tried_bytes
        if search.is_it(unit_bytes):
            search.found.append(Product(row, known, element))
        return
    most = _most(row, search.numbers)
    if most is None:
        return
    if search.slack_bytes:  # for a rounded number only the full step can match
        search.chance += search.window_bytes / search.tried_bytes
        if search.is_it(unit_bytes * most):
            search.found.append(Product(row, {"tokens": most, **known}, element))
        return
    search.chance += 1 / unit_bytes
    tokens, rest = divmod(search.tried_bytes, unit_bytes)
    if rest == 0 and 0 < tokens <= most:
        search.found.append(Product(row, {"tokens": tokens, **known}, element))


def _values(name: str, numbers: Mapping[str, int]) -> Iterator[int]:
    """Yield a number's possible values in a tensor: as it is, padded, and one rank's share."""
    value = numbers[name]
    ranks = numbers.get("ranks", 1)
    whole = [value]
    if name == "vocabulary" and value % _VOCABULARY_MULTIPLE:
        whole.append(-(-value // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE)
    yield from whole
    if ranks > 1 and name in _OF_THE_MODEL:
        for one in whole:
            if one % ranks == 0:
                yield one // ranks


# Numbers of a matrix that ranks may share.
_OF_THE_MODEL: Final = frozenset(
    {
        "vocabulary",
        "queries",
        "keys",
        "mlp",
        "plain_mlp",
        "double_mlp",
        "fused_queries",
        "experts",
        "expert_mlp",
        "double_expert_mlp",
        "encoder_width",
        "encoder_mlp",
        "matrix",
    }
)


# An error may name an array's shape and type but round its bytes: numpy prints three digits.

_BITS: Final = re.compile(r"(?:u?int|float|complex)(8|16|32|64|128)")
_OF_NAME: Final = {"bool": 1, "object": 8}


def array_bytes(incident: Incident) -> int | None:
    """Return the bytes of the refused array, or None without a shape or a plain type."""
    shape, name = (incident.facts.get(fact) for fact in ("array_shape", "array_type"))
    if shape is None or name is None:
        return None
    counts = re.findall(r"\d{1,18}", str(shape.value))
    bits = _BITS.fullmatch(str(name.value))
    element = int(bits.group(1)) // 8 if bits else _OF_NAME.get(str(name.value))
    if element is None or not counts:
        return None
    return math.prod(map(int, counts)) * element


# The memory model loads only if a model may be read, so that a saved log alone is fast.

KINDS: Final = frozenset(
    {
        "cuda_oom",
        "hip_oom",
        "xpu_oom",
        "npu_oom",
        "host_oom",
        "sampler_warmup_oom",
        "pooler_warmup_oom",
    }
)
# Default block sizes in tokens, on a device and on the CPU. A row of block numbers is padded to
# this.
_BLOCK_TOKENS: Final = (16, 128)
_ALIGNED_TOKENS: Final = 128
_NGRAM: Final = frozenset({"ngram", "[ngram]", "ngram_gpu"})
_SETTINGS: Final = ("max_num_seqs", "max_model_len", "max_num_batched_tokens")


@dataclass(frozen=True, slots=True)
class FailedAllocation:
    """Report a failed allocation and its start, if readable.

    Attributes:
        named: the purpose of the allocation.
        start: the start; None if its model cannot be read.
        by_bytes: whether its bytes identify the purpose.
        prompt_tokens: the longest prompt if a step must not split it; else 0.
    """

    named: Named
    start: FailedStart | None
    by_bytes: bool = True
    prompt_tokens: int = 0


def failed_allocation(
    incident: Incident, model: str | None = None, *, reads_models: bool = True
) -> FailedAllocation | None:
    """Identify a failed allocation; None if neither its bytes nor the traceback do.

    Args:
        incident: the failure with the effective settings.
        model: the folder or hub name to read instead of the log's; None for the log's.
        reads_models: whether oomguard may read a folder that the log names.
    """
    exact = array_bytes(incident)
    if exact is None:
        tried = incident.number("tried_bytes")
    else:
        tried = exact
    if incident.kind not in KINDS or incident.framework != "vllm" or not tried or tried <= 0:
        return None
    if reads_models:
        start = _start(incident, model)
    else:
        start = None
    numbers = _numbers(incident, start)
    if exact is None:
        slack = incident.slack("tried_bytes")
    else:
        slack = 0.0
    named = name_allocation(
        int(tried), slack, numbers, incident.phase, on_host=incident.kind == "host_oom"
    )
    by_evidence = allocation_from_traceback(tried, numbers, (incident.kind, incident.phase))
    prompt = _whole_prompt(incident, numbers)
    if named is not None and (
        not slack
        or by_evidence is None
        or by_evidence.allocation.name == named.product.allocation.name
    ):
        return FailedAllocation(named, start, prompt_tokens=prompt)
    if by_evidence is None:
        return None
    return FailedAllocation(
        Named(by_evidence, MOST_SURE), start, by_bytes=False, prompt_tokens=prompt
    )


def _whole_prompt(incident: Incident, numbers: Mapping[str, int]) -> int:
    """Return the tokens of the longest prompt if chunked prefill is off, else 0.

    vLLM rejects a smaller step (vllm/config/scheduler.py).
    """
    whole = incident.facts.get("whole_prompts")
    if whole is not None and whole.value is True:
        return numbers.get("max_model_len", 0)
    return 0


def _start(incident: Incident, model: str | None) -> FailedStart | None:
    """Return the start of a failure with defaults filled in, or None if its model is unreadable."""
    from oomguard.estimate.start.failed_start import read_failed_start
    from oomguard.estimate.start.start import most_default_rows, with_defaults

    start = read_failed_start(incident, model, of_unknown_size=80 * GIB)
    if start is None:
        return None
    settings = with_defaults(start.settings, start.model.shape, [])
    return replace(
        start, settings=replace(settings, max_num_seqs=most_default_rows(start.settings, settings))
    )


def with_allocation(
    incident: Incident, model: str | None = None, *, local: bool = False
) -> Incident:
    """Return the incident with the purpose of its failed allocation, if known.

    ``local`` means that it failed on this machine just now: oomguard may read its folders, and the
    host's free memory counts.
    """
    found = failed_allocation(incident, model, reads_models=local or model is not None)
    facts: dict[str, Fact] = dict(incident.facts)
    if local and incident.kind == "host_oom":
        from oomguard.probe.host import (
            read_available_bytes,
            read_data_limit_bytes,
            read_total_bytes,
        )

        read = {
            "host_available_bytes": read_available_bytes(),
            "process_data_limit_bytes": read_data_limit_bytes(),
            "host_total_bytes": read_total_bytes(),
        }
        for name, size in read.items():
            less = incident.number(name)  # the engine's own processes may have less
            known = []
            for one in (size, less):
                if one is not None:
                    known.append(int(one))
            facts.update({name: Fact(name, min(known), "measured")} if known else {})
    if found is not None and found.by_bytes:
        named = found.named
        values: dict[str, FactValue] = {
            "allocation": named.product.allocation.name,
            "allocation_terms": f"{named.product.allocation.what} ({named.product})",
            "allocation_sure_ratio": named.sure,
        }
        if named.product.allocation.of_request:
            values["allocation_of_request"] = True
        facts.update({name: Fact(name, value, "solved") for name, value in values.items()})
    return replace(incident, facts=MappingProxyType(facts))


def _numbers(incident: Incident, start: FailedStart | None) -> dict[str, int]:
    """Return the possible factors of a tensor size: effective settings and model numbers."""
    if start is None:
        numbers = {}
    else:
        numbers = (
            _of_shape(start.model.shape)
            | _of_settings(start.settings)
            | _of_cache(start, incident)
            | _of_encoder(start)
            | _of_weights(start, incident)
        )
    for name in (*_SETTINGS, "max_loras", "max_lora_rank"):
        known = value_in_force(name, incident.settings, incident.facts)
        if (
            known is not None
            and isinstance(known[0], int)
            and not isinstance(known[0], bool)
            and known[0] > 0
        ):
            numbers[name] = known[0]
    lora = value_in_force("enable_lora", incident.settings, incident.facts)
    if lora is not None and lora[0] is True:
        numbers["enable_lora"] = 1
    drafted = _drafted(incident)
    if drafted is not None:
        numbers |= {"speculative_config": 1, "drafted": drafted + 1}
    if "ngram_frames" in incident.facts or _speculation(incident).get("method") in _NGRAM:
        numbers["ngram" if incident.kind == "host_oom" else "ngram_gpu"] = 1
    # A product with a zero or negative factor matches nothing.
    positive = {}
    for name, value in numbers.items():
        if value > 0:
            positive[name] = value
    return positive


def _of_shape(shape: ModelShape) -> dict[str, int]:
    from oomguard.estimate.model.parameters import has_gate, has_plain_activation

    try:
        mlp = shape.number("intermediate_size") or 4 * shape.hidden
        experts = shape.number("num_experts") or 0
        expert_mlp = shape.number("moe_intermediate_size") or mlp
    except OomguardError:
        return {}
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
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
    known = {name: getattr(settings, name) or 0 for name in _SETTINGS} | {
        "ranks": settings.tensor_parallel_size
    }
    if settings.enable_lora:
        known |= {
            "enable_lora": 1,
            "max_loras": settings.max_loras,
            "max_lora_rank": settings.max_lora_rank,
        }
    length = settings.max_model_len
    block = settings.block_size or _BLOCK_TOKENS[settings.device == "cpu"]
    if length:
        aligned = max(
            1, _ALIGNED_TOKENS // math.gcd(_ALIGNED_TOKENS, block)
        )  # get_block_table_width
        known["blocks_unpadded"] = -(-length // block)
        known["blocks_per_request"] = -(-length // (block * aligned)) * aligned
    return known


def _of_cache(start: FailedStart, incident: Incident) -> dict[str, int]:
    """Return the KV cache's blocks and a block's bytes, if set by number or bytes."""
    from oomguard.estimate.start.failed_start import exact_kv

    cache = exact_kv(start)
    if cache is None:
        return {}
    override = incident.number("num_gpu_blocks_override")
    pool = start.settings.kv_cache_memory_bytes
    if override:
        blocks = int(override)
    else:
        blocks = (pool or 0) // cache.block_bytes
    page = 0
    for group in cache.layout.groups:
        page = max(page, *group.pages_bytes)
    return {"kv_blocks": blocks, "kv_page": page, "kv_block": cache.block_bytes}


def _of_weights(start: FailedStart, incident: Incident) -> dict[str, int]:
    """Return the elements of the parameter nearest to an allocation that failed while loading.

    Their shapes do not follow from the widths.
    """
    tried, element = incident.number("tried_bytes"), start.model.shape.dtype_bytes
    if incident.phase != "load_weights" or not tried or not start.model.exact:
        return {}
    from oomguard.estimate.start.failed_start import read_draft

    found = {"matrix": _nearest(start.model.parameters, tried / element)}
    draft = read_draft(incident, start.settings.dtype)
    if draft is not None and draft.exact:
        found["draft_matrix"] = _nearest(draft.parameters, tried / element)
    return found


def _nearest(parameters: Iterable[Parameter], elements: float) -> int:
    """Return the elements of the parameter, or pair of equal ones, nearest to a size; else 0."""
    sizes = set()
    for parameter in parameters:
        for times in (1, 2):
            sizes.add(times * parameter.elements)
    return min(sizes, key=lambda size: abs(size - elements), default=0)


def _of_encoder(start: FailedStart) -> dict[str, int]:
    """Return the number of profiled images or audios, the patches of one, and the widths."""
    from oomguard.estimate.start.encoder_profile import encoder_of, profile_encoder

    try:
        encoder = encoder_of(start.model, start.settings)
        if encoder is None:
            profile = None
        else:
            profile = profile_encoder(encoder, start.settings, start.model.shape.dtype_bytes)
    except OomguardError:
        return {}
    if encoder is None or profile is None:
        return {}
    patches = round(profile.tokens_per_item * encoder.patches_per_token)
    return {
        f"{encoder.modality}s": profile.items,
        **(
            {"patches": patches, "patches_and_class": patches + 1}
            if encoder.in_prompt
            else {"frames": patches}
        ),
        "encoder_width": encoder.width,
        "encoder_mlp": encoder.mlp_width,
    }


def _drafted(incident: Incident) -> int | None:
    """Return the number of draft tokens, or None if unknown."""
    value = _speculation(incident).get("num_speculative_tokens")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    printed = incident.number("drafted_tokens")
    if printed is None:
        return None
    return int(printed)


def _speculation(incident: Incident) -> Mapping[str, object]:
    """Return the user's configuration of speculative decoding, or an empty mapping."""
    known = value_in_force("speculative_config", incident.settings, incident.facts)
    try:
        if known is not None and isinstance(known[0], str):
            config = json.loads(known[0])
        else:
            config = None
    except (ValueError, RecursionError):
        return {}
    if isinstance(config, Mapping):
        return config
    return {}
