"""Define the records of a planned start: vLLM's settings with their defaults, and the bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from packaging.version import Version

from oomguard.core.errors import SettingError
from oomguard.core.incident import Patch
from oomguard.core.records import Record
from oomguard.core.settings import as_env, as_flag, as_kwarg, default_value, device_size, effect_of
from oomguard.estimate import Fit, answer
from oomguard.estimate.constants import gpus, plain_name, rows_of, since, tables
from oomguard.estimate.model.layer_caches import keeps_latent
from oomguard.estimate.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Correction:
    """Hold the difference between a measured start and the model's sum, in bytes by part.

    ``source`` names the start. ``uncertainty_bytes`` is the rounding of its printed numbers. It
    replaces the priors' uncertainty for a start with the same rows, tokens and graphs.
    """

    source: str
    weights_bytes: int = 0
    peak_activation_bytes: int = 0
    non_torch_bytes: int = 0
    cudagraph_bytes: int = 0
    uncertainty_bytes: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    enforce_eager: bool = False


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Hold vLLM's settings by their own names; None is the engine's default.

    ``device_free_bytes`` is the device's free memory at the start; None means all except the CUDA
    context. ``device_free_from`` is its source if it is an assumption. ``driver_version`` is the
    NVIDIA driver's; None if unknown. ``unified_memory``: whether the host's programs share the
    memory. ``compile_cache_entry``: whether vLLM's compile cache may have an entry of this start;
    None if it is not visible. ``peak_activation_ratio`` is the minimum ratio of the peak to the
    model's sum, for a start that failed before its measurement.
    """

    version: Version
    gpu_total_bytes: int
    gpu_memory_utilization: float
    device: str = "cuda"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    disable_custom_all_reduce: bool = False
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    block_size: int | None = None
    enforce_eager: bool = False
    cudagraph_capture_sizes: str | None = None
    max_cudagraph_capture_size: int | None = None
    enable_prefix_caching: bool | None = None
    cpu_offload_bytes: int = 0
    speculative_config: str | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    limit_mm_per_prompt: str | None = None
    mm_processor_kwargs: str | None = None
    skip_mm_profiling: bool = False
    gpu_name: str | None = None
    driver_version: str | None = None
    prompt_logprobs: bool = False
    device_free_bytes: int | None = None
    device_free_from: str = ""
    unified_memory: bool = False
    compile_cache_entry: bool | None = None
    correction: Correction | None = None
    peak_activation_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Report one rank of a pipeline stage, in bytes.

    Attributes:
        number: the stage, from 0.
        weights_bytes: the weights, including a draft's and the LoRA slots.
        peak_activation_bytes: the peak that the start measures.
        pool_bytes: the KV cache's pool, negative if the other parts leave none.
        request_bytes: one request of the full length in the pool.
        block_bytes: vLLM's own null block.
        unprofiled_bytes: additional memory of sampling at its first use, beyond the peak.
        used_bytes: all device memory in use while the engine runs, including memory not free at the
            start.
    """

    number: int
    weights_bytes: int
    peak_activation_bytes: int
    pool_bytes: int
    request_bytes: int
    block_bytes: int = 0
    unprofiled_bytes: int = 0
    used_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """Return the smallest pool for one request of the full length and the null block."""
        return self.request_bytes + self.block_bytes


@dataclass(frozen=True, slots=True, repr=False)
class StartBudget(Record):
    """Report the fullest GPU's budget in bytes, and the capacity of its KV cache.

    Attributes:
        model: the model as the user named it.
        settings: vLLM's settings with the engine's defaults.
        requested_bytes: the memory that the utilization allows the engine.
        weights_bytes: the model's own weights.
        draft_weights_bytes: a draft model's weights.
        lora_bytes: the slots of LoRA adapters.
        peak_activation_bytes: the peak that the start measures.
        compile_bytes: the part of that peak that only a first, compiling start has; a compile cache
            entry makes it 0.
        page_cache_bytes: host page cache of the weight files that the engine may count as used; 0
            if it does not.
        cudagraph_bytes: CUDA graphs.
        non_torch_bytes: memory that torch does not allocate: NCCL, libraries.
        not_free_bytes: memory that is not free at the start; the CUDA context if nothing else is
            known.
        prompt_logprobs_bytes: additional memory of prompt log-probabilities, which no start
            reserves.
        kv_cache_pool_bytes: the pool of the KV cache, negative if the other parts leave none.
        kv_bytes_per_token: one token in every layer that caches tokens.
        kv_cache_blocks: blocks in the pool.
        block_tokens: tokens per block.
        kv_cache_tokens: tokens in the engine's log: concurrency times length.
        max_concurrency: requests of the full length at once.
        longest_request_tokens: the longest request that fits.
        uncertainty_bytes: by how much the pool may be smaller.
        stages: the pipeline stages.
        assumptions: one line for each value that was neither given nor read.
        reasons: one line for each reason why it does not fit; empty if it fits.
        kept_back_bytes: the pool's safety reserve, because starts of other versions and GPUs
            exceeded their parts.
        unread: keys of the configuration that may shape the cache or the weights but were not read.
        little_known: what oomguard does not understand of such starts, with its evidence, or None.
        uncertain_part: the part with the largest uncertainty.
        free_short_bytes: how much more the engine asks for than is free at its start; 0 or more.
        free_uncertain_bytes: by how much more memory may be free than assumed.
        uncertainty_above_bytes: by how much the pool may be larger.
        more_bytes: the part of that which has a name: what a second start does not compile, a
            loaded embedding that is returned, and a sampler without a sort.
    """

    model: str
    settings: VllmSettings
    requested_bytes: int
    weights_bytes: int
    draft_weights_bytes: int
    lora_bytes: int
    peak_activation_bytes: int
    compile_bytes: int
    page_cache_bytes: int
    cudagraph_bytes: int
    non_torch_bytes: int
    not_free_bytes: int
    prompt_logprobs_bytes: int
    kv_cache_pool_bytes: int
    kv_bytes_per_token: int
    kv_cache_blocks: int
    block_tokens: int
    kv_cache_tokens: int
    max_concurrency: float
    longest_request_tokens: int
    uncertainty_bytes: int
    stages: tuple[Stage, ...]
    assumptions: tuple[str, ...]
    reasons: tuple[str, ...]
    kept_back_bytes: int = 0
    unread: tuple[str, ...] = ()
    little_known: str | None = None
    uncertain_part: str = ""
    free_short_bytes: int = 0
    free_uncertain_bytes: int = 0
    uncertainty_above_bytes: int = 0
    more_bytes: int = 0

    @property
    def fit(self) -> Fit:
        """Return whether the engine would start: ``yes``, ``no``, or ``unsure``."""
        set_in_bytes = self.settings.kv_cache_memory_bytes is not None
        if set_in_bytes and self.margin_bytes < 0 and not self.unread:
            return "no"
        above = max(self.uncertainty_bytes, self.uncertainty_above_bytes)
        found = {
            answer(
                self.spare_bytes,
                self.uncertainty_bytes,
                above_bytes=above,
                unread=bool(self.unread or self.little_known),
            )
        }
        for short, uncertain in (
            (self.free_short_bytes, self.free_uncertain_bytes),
            (self.beyond_bytes, self.uncertainty_bytes + self.free_uncertain_bytes),
        ):
            if short > uncertain:
                return "no"
            if short > 0:
                found.add("unsure")
        if "no" in found:
            return "no"
        if "unsure" in found:
            return "unsure"
        return "no" if self.reasons else "yes"

    @property
    def fits(self) -> bool:
        """Return whether the engine would surely start with these settings."""
        return self.fit == "yes"

    @property
    def is_expected_to_fit(self) -> bool:
        """Return whether the engine would start if every part had its planned size."""
        return not self.reasons

    @property
    def margin_bytes(self) -> int:
        """Return the pool bytes beyond one request of the full length, on the tightest stage."""
        return min(stage.pool_bytes - stage.needed_bytes for stage in self.stages)

    @property
    def beyond_bytes(self) -> int:
        """Return the bytes of all parts beyond the device, on the fullest stage; 0 or more."""
        return max(0, *(stage.used_bytes - self.settings.gpu_total_bytes for stage in self.stages))

    @property
    def spare_bytes(self) -> int:
        """Return the uncertain bytes to spare on the tightest stage.

        A pool set in bytes is certain, but the rest of the device is not.
        """
        if self.settings.kv_cache_memory_bytes is None:
            return self.margin_bytes
        return self.settings.gpu_total_bytes - max(stage.used_bytes for stage in self.stages)


def start_patch(
    name: str,
    old: Any,
    new: Any,
    reason: str,
    predicts: Mapping[str, float] = MappingProxyType({}),
    *,
    version: str | None = None,
) -> Patch:
    """Return a patch of one setting of a vLLM start, spelled for that version of vLLM.

    ``predicts`` is by fact.
    """
    return Patch(
        name,
        old,
        new,
        effect_of(name, old, new),
        reason,
        as_flag=as_flag(name, new, "vllm", version),
        as_kwarg=as_kwarg(name, new, "vllm", version),
        as_env=as_env(name, new),
        predicts=predicts,
    )


# vLLM's ``limit_mm_per_prompt`` that leaves the encoder unused.
NO_IMAGES: Final = '{"image": 0, "video": 0}'

# A known GPU's architecture and links decide padding and buffers in the engine.

# Boards of one name report sizes that differ by this much (ECC, firmware).
_SAME_SIZE_RATIO: Final = 0.005
# vLLM makes a custom all-reduce without links between at most this many ranks:
# vllm/distributed/device_communicators/custom_all_reduce.py.
UNLINKED_RANKS: Final = 2
# NVIDIA's names for its workstation and server cards.
_ARCHITECTURE: Final = re.compile(r"(?i)\b(blackwell|hopper|ada|ampere|turing)\b")


def known_gpu(settings: VllmSettings) -> dict[str, Any] | None:
    """Return the row of a start's GPU, by name or else by size; None for an unknown GPU."""
    if settings.gpu_name:
        name = plain_name(settings.gpu_name)
        named = []
        for row in gpus():
            if plain_name(row["name"]) in name:
                named.append(row)
        # The longest name is the most specific one: "L40S" also contains "L40" and "L4".
        if named:
            return max(named, key=lambda row: len(row["name"]))
    total = settings.gpu_total_bytes
    sized = []
    for row in gpus():
        if not row.get("named_only"):
            sized.append(row)
    nearest = min(sized, key=lambda row: abs(row["total_bytes"] - total))
    if abs(nearest["total_bytes"] - total) <= _SAME_SIZE_RATIO * total:
        return nearest
    return None


def has_nvlink(settings: VllmSettings) -> bool:
    """Return whether the GPUs of a start have direct links; an unknown GPU's size decides."""
    row = known_gpu(settings)
    if row is not None:
        return bool(row.get("nvlink", False))
    return settings.gpu_total_bytes >= int(tables()["defaults"]["nvlink_from_bytes"])


def architecture_of(settings: VllmSettings) -> str | None:
    """Return the architecture of a start's GPU.

    A known GPU's row has it, or its name contains it. Returns None otherwise.
    """
    row = known_gpu(settings)
    name = settings.gpu_name or ""
    match = _ARCHITECTURE.search(name)
    named = row is not None and plain_name(row["name"]) in plain_name(name)
    if match is not None and not named:
        return match[1].lower()
    if row is None:
        return None
    return str(row["architecture"])


def has_custom_allreduce(settings: VllmSettings) -> bool:
    """Return whether CUDA graphs capture vLLM's own all-reduce.

    It needs links, or two GPUs that read each other's memory.
    """
    ranks = settings.tensor_parallel_size
    if ranks == 1 or settings.disable_custom_all_reduce:
        return False
    reads = bool((known_gpu(settings) or {}).get("peer_access", True))
    return has_nvlink(settings) or (ranks == UNLINKED_RANKS and reads)


def fused_allreduce_bytes(settings: VllmSettings) -> int:
    """Return the bytes of the fused all-reduce's buffers on each rank.

    Returns 0 if the version or the GPU has none.
    """
    ranks, architecture = settings.tensor_parallel_size, architecture_of(settings)
    alone = (
        settings.pipeline_parallel_size == 1
        and settings.data_parallel_size == 1
        and not settings.enforce_eager
    )
    if ranks == 1 or not alone or not has_nvlink(settings):
        return 0
    for row in rows_of("fused_allreduce", settings.version):
        if architecture in row["architectures"]:
            return int(row["bytes_of_ranks"].get(str(ranks), 0))
    return 0


def is_hopper_or_later(settings: VllmSettings) -> bool:
    """Return whether the GPU is Hopper or linked Blackwell, whose libraries need more memory."""
    architecture = architecture_of(settings)
    return architecture == "hopper" or (architecture == "blackwell" and has_nvlink(settings))


def is_rocm(settings: VllmSettings) -> bool:
    """Return whether a start uses a known AMD GPU."""
    return architecture_of(settings) in tables()["defaults"]["rocm_architectures"]


def is_unmeasured_platform(settings: VllmSettings) -> bool:
    """Return whether the GPU's name is one of a platform without measured starts, such as XPU."""
    words = re.findall(r"[a-z]+", (settings.gpu_name or "").lower())
    return not set(words).isdisjoint(tables()["defaults"]["unmeasured_platforms"])


def mxfp4_padding(settings: VllmSettings, hidden: int, width: int) -> float:
    """Return the growth factor of MXFP4 experts in the engine.

    Its kernels need multiples of the hidden size and the width.

    Args:
        settings: vLLM's settings.
        hidden: the hidden size.
        width: the experts' width on one rank.
    """
    architecture = "cpu" if settings.device == "cpu" else architecture_of(settings)
    rows = tables()["mxfp4_padding"]
    rule = rows[-1]
    for row in rows:
        if row.get("architecture") == architecture:
            rule = row
            break
    return _multiple(hidden, rule["hidden"]) / hidden * _multiple(width, rule["width"]) / width


def nvfp4_padding(settings: VllmSettings, width: int) -> float:
    """Return the growth factor of NVFP4 experts without a gate in the engine.

    oomguard assumes that an unknown GPU computes in NVFP4.
    """
    architecture = architecture_of(settings)
    rule = tables()["nvfp4_padding"][0]
    own = architecture is None or architecture in rule["architectures"]
    if own and settings.device != "cpu":
        return _multiple(width, rule["width"]) / width
    return 1.0


def _multiple(value: int, of: int) -> int:
    return -(-value // of) * of


# vLLM rejects some settings before it looks at memory: indivisible ranks, and impossible lengths or
# block sizes.


def refuse_impossible(settings: VllmSettings, shape: ModelShape) -> None:
    """Raise SettingError for settings that the engine rejects; all defaults must be filled in."""
    if settings.gpu_total_bytes <= 0:
        raise SettingError("a GPU needs more than 0 bytes", hint="--gpu-memory 24GiB")
    _check_ranks(settings, shape)
    tokens = settings.max_num_batched_tokens or 0
    rows = settings.max_num_seqs or 0
    length = settings.max_model_len or 0
    if tokens < rows:
        raise SettingError(f"max_num_batched_tokens is {tokens}, less than max_num_seqs {rows}")
    multiple = block_multiple_tokens(settings, shape)
    if (
        settings.block_size
        and settings.block_size % multiple
        and since("block_multiple_since", settings.version)
    ):
        raise SettingError(
            f"block_size {settings.block_size} is invalid",
            hint=f"attention needs multiples of {multiple} tokens",
        )
    if shape.max_positions is not None and length > max(
        shape.max_positions, shape.default_length or 0
    ):
        raise SettingError(
            f"max_model_len is {length}, but the model supports {shape.max_positions}",
            hint="vLLM refuses it unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set",
        )


def _check_ranks(settings: VllmSettings, shape: ModelShape) -> None:
    ranks = settings.tensor_parallel_size
    stages = settings.pipeline_parallel_size
    if stages > shape.layers:
        raise SettingError(
            f"pipeline_parallel_size is {stages}, but the model has {shape.layers} layers"
        )
    _check_context_ranks(settings, shape)
    attends = "num_attention_heads" in shape.config or shape.heads > 1
    if attends and shape.heads % ranks:
        raise SettingError(
            f"tensor_parallel_size is {ranks}, which does not divide the {shape.heads} attention "
            "heads"
        )
    if attends and not keeps_latent(shape) and shape.kv_heads % ranks and ranks % shape.kv_heads:
        raise SettingError(
            f"tensor_parallel_size is {ranks}, neither a divisor nor a multiple of the "
            f"{shape.kv_heads} key-value heads"
        )


def _check_context_ranks(settings: VllmSettings, shape: ModelShape) -> None:
    """Raise SettingError for ranks that cannot share a request's tokens.

    Sources: config/parallel.py and config/model.py, 0.20 to 0.32.
    """
    context = settings.decode_context_parallel_size
    ranks = settings.tensor_parallel_size
    if ranks % context:
        raise SettingError(
            f"decode_context_parallel_size is {context}, which does not divide "
            f"tensor_parallel_size {ranks}",
            hint=("it does not add GPUs: it splits the ranks that store the same key-value heads"),
        )
    if context > 1 and not keeps_latent(shape):
        most = ranks // shape.kv_heads
        queries = shape.heads // shape.kv_heads
        if context > most or queries % context:
            raise SettingError(
                f"decode_context_parallel_size is {context}, but only {most} of {ranks} "
                f"ranks store the same key-value heads of {shape.kv_heads}",
                hint=f"use at most {most}, and a divisor of the {queries} queries per head",
            )


def has_latent_blocks(settings: VllmSettings, shape: ModelShape) -> bool:
    """Return whether a CPU kernel stores a latent cache in blocks of its own size.

    It does not on AMX (vllm/platforms/cpu.py).
    """
    if not keeps_latent(shape):
        return False
    from oomguard.probe.host import has_matrix_tiles

    return not (since("latent_tiles_since", settings.version) and has_matrix_tiles())


def block_multiple_tokens(settings: VllmSettings, shape: ModelShape) -> int:
    """Return the tokens that a KV cache block must be a multiple of, by backend and attention."""
    if settings.device == "cuda":
        name = "cuda_block_multiple_tokens"
    elif has_latent_blocks(settings, shape):
        name = "cpu_latent_block_tokens"
    else:
        name = "cpu_block_multiple_tokens"
    return int(tables()["defaults"][name])


def with_defaults(settings: VllmSettings, shape: ModelShape, assumed: list[str]) -> VllmSettings:
    """Return the settings with the engine's defaults; add a line to ``assumed`` for each."""
    on_cpu = settings.device == "cpu"
    version = str(settings.version)
    if on_cpu:
        size = "cpu"
    else:
        size = device_size("vllm", settings.gpu_total_bytes, settings.gpu_name, version)
    if on_cpu:
        ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    else:
        ranks = 1
    changes: dict[str, Any] = {}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(settings, name) is None:
            default = default_value(name, "vllm", version, device_size=size)
            changes[name] = int(default or 1) * ranks
            assumed.append(f"{name} {changes[name]}: vllm serve's default on a device of this size")
    if settings.max_model_len is None:
        changes["max_model_len"] = shape.default_length or int(
            tables()["defaults"]["length_of_no_key_tokens"]
        )
        assumed.append(f"max_model_len {changes['max_model_len']}: the model's own")
    filled = replace(settings, **changes)
    # vLLM adapts only the default value to the user's (vllm/engine/arg_utils.py, 0.32).
    if "max_num_batched_tokens" in changes:
        most = (filled.max_num_seqs or 1) * (filled.max_model_len or 1)
        filled = replace(
            filled, max_num_batched_tokens=min(most, filled.max_num_batched_tokens or most)
        )
    if "max_num_seqs" in changes:
        filled = replace(
            filled, max_num_seqs=min(filled.max_num_seqs or 1, filled.max_num_batched_tokens or 1)
        )
    return filled


def most_default_rows(given: VllmSettings, filled: VllmSettings) -> int:
    """Return the maximum of running requests: the given one, or vLLM's largest default.

    On the CPU backend ``LLM`` uses twice the rows of a server, and a log does not show which one
    ran.
    """
    rows = filled.max_num_seqs or 1
    on_cpu = given.device == "cpu" and given.max_num_seqs is None
    if on_cpu and rows < (filled.max_num_batched_tokens or 0):
        return 2 * rows
    return rows
