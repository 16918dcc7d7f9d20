"""The records of a planned start: the engine's settings, and where the bytes of each GPU go under them."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version


@dataclass(frozen=True, slots=True)
class Correction:
    """What a start of this model measured beyond the model's own sum, in bytes, part by part; ``source`` says which start.

    ``uncertainty_bytes`` is what the printed figures leave open. It stands in for the priors' own, where a plan has the rows,
    tokens and graphs that were measured.
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
    """vLLM's own settings by their own names; None stands for the engine's default.

    ``device_free_bytes`` is what is free of the device when the engine starts, None for all but the context;
    ``device_free_from`` says where that was taken from, where it is an assumption.
    """

    version: Version
    gpu_total_bytes: int
    gpu_memory_utilization: float
    device: str = "cuda"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
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
    enable_prefix_caching: bool | None = None
    cpu_offload_bytes: int = 0
    speculative_config: str | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    limit_mm_per_prompt: str | None = None
    gpu_name: str | None = None
    prompt_logprobs: bool = False
    device_free_bytes: int | None = None
    device_free_from: str = ""
    correction: Correction | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage's ranks, in bytes: what each holds, the KV cache's pool, and one request of the full length.

    ``unprofiled_bytes`` is what sampling takes at its first use beyond the peak that the start measures; ``used_bytes`` all that
    one of its devices holds when the engine runs, what is not free at the start included.
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
        """The smallest pool that one request of the full length fits in, the block that vLLM keeps for itself beside it."""
        return self.request_bytes + self.block_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The budget of the fullest GPU, in bytes, and what its KV cache holds.

    ``settings`` are filled in as the engine would; ``requested_bytes`` is what its utilization allows; ``reasons`` says why
    it does not fit, ``assumptions`` what was neither given nor read; ``uncertainty_bytes`` belongs to the pool.
    """

    model: str
    settings: VllmSettings
    requested_bytes: int
    weights_bytes: int
    draft_weights_bytes: int
    adapter_bytes: int
    peak_activation_bytes: int
    cudagraph_bytes: int
    non_torch_bytes: int
    context_bytes: int
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

    @property
    def fits(self) -> bool:
        """Whether the engine would start with these settings."""
        return not self.reasons

    @property
    def margin_bytes(self) -> int:
        """What the pool has beyond one request of the full length, on the stage with least."""
        return min(stage.pool_bytes - stage.needed_bytes for stage in self.stages)

    @property
    def has_margin(self) -> bool:
        """Whether it still fits when the pool is smaller by its uncertainty; a pool set in bytes has none."""
        set_in_bytes = self.settings.kv_cache_memory_bytes is not None
        return self.fits and (set_in_bytes or self.margin_bytes >= self.uncertainty_bytes)


@dataclass(frozen=True, slots=True)
class GeneratePlan:
    """One call of transformers' ``generate`` on one GPU, in bytes; ``traced`` says that the model's own code was run.

    ``kv_cache_bytes`` is the cache at the call's end, ``peak_bytes`` the most that is allocated at once, weights included,
    ``reserved_bytes`` what torch's caching allocator holds then. ``largest_batch_size`` is how many rows would fit, 0 for none.
    """

    model: str
    gpu_total_bytes: int
    batch_size: int
    prompt_tokens: int
    max_new_tokens: int
    num_beams: int
    attn_implementation: str
    cache_implementation: str | None
    weights_bytes: int
    kv_bytes_per_token: int
    kv_cache_bytes: int
    peak_bytes: int
    reserved_bytes: int
    context_bytes: int
    largest_batch_size: int
    uncertainty_bytes: int
    traced: bool
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the call's reserved memory and the context fit on the GPU."""
        return self.reserved_bytes + self.context_bytes <= self.gpu_total_bytes
