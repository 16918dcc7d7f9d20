"""Define the records of a planned start: vLLM's settings, and the bytes of each GPU."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from oomguard.core.records import Record
from oomguard.estimate.fit import Fit, answer


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
                unread=bool(self.unread),
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
