"""The records of a start before it is made: vLLM's settings, and where the bytes of each GPU go
under them.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from oomguard.core.records import Record


@dataclass(frozen=True, slots=True)
class Correction:
    """What a start of this model measured beyond the model's own sum, in bytes, part by part.

    ``source`` names the start. ``uncertainty_bytes`` is what its printed figures leave open; it
    takes the place of the priors' own for a start with the rows, tokens and graphs that were
    measured.
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
    """vLLM's settings by their own names; None stands for the engine's default.

    ``device_free_bytes`` is what is free of the device when the engine starts, None for all but the
    CUDA context; ``device_free_from`` says what it was taken from, where it is an assumption.
    ``driver_version``: the NVIDIA driver's, None where it is not known. ``unified_memory``: whether
    the host's own programs take of it too. ``compile_cache_entry``: whether vLLM's compile cache
    may have an entry of this start, None where it cannot be seen. ``peak_activation_ratio`` is by
    how much the peak is larger at least than by the model's sum, where a start failed before it was
    measured.
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
    """One rank of a pipeline stage, in bytes.

    Attributes:
        number: the stage, from 0.
        weights_bytes: the weights, a draft's and the LoRA slots included.
        peak_activation_bytes: the peak that the start measures.
        pool_bytes: the KV cache's pool, below zero where the rest leaves none.
        request_bytes: what one request of the full length takes of it.
        block_bytes: the block that vLLM keeps for itself.
        unprofiled_bytes: what sampling takes at its first use, beyond the peak.
        used_bytes: all that the device holds when the engine runs, including what was not free at
            the start.
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
        """The smallest pool for one request of the full length beside the block that vLLM keeps for
        itself.
        """
        return self.request_bytes + self.block_bytes


@dataclass(frozen=True, slots=True, repr=False)
class StartBudget(Record):
    """The budget of the fullest GPU, in bytes, and what its KV cache holds.

    Attributes:
        model: the model as the user named it.
        settings: vLLM's settings, filled in as the engine would.
        requested_bytes: what the utilization allows the engine.
        weights_bytes: the model's own weights.
        draft_weights_bytes: a draft model's weights.
        lora_bytes: the slots of LoRA adapters.
        peak_activation_bytes: the peak that the start measures.
        compile_bytes: the share of that peak that only a first start has, which compiles; its
            compile cache makes it 0.
        page_cache_bytes: what the start may count besides, of the host's page cache that its
            weights' files fill; 0 where no start does.
        cudagraph_bytes: CUDA graphs.
        non_torch_bytes: what torch does not allocate: NCCL, libraries.
        not_free_bytes: what is not free at the start; the CUDA context where nothing else is known.
        prompt_logprobs_bytes: what log-probabilities of prompts take on top; no start reserves it.
        kv_cache_pool_bytes: the pool of the KV cache, below zero where the rest leaves none.
        kv_bytes_per_token: one token in every layer that keeps tokens.
        kv_cache_blocks: blocks in the pool.
        block_tokens: tokens in a block.
        kv_cache_tokens: tokens that the engine logs: requests at once times their length.
        max_concurrency: requests of the full length at once.
        longest_request_tokens: the longest request that fits.
        uncertainty_bytes: by how much the pool may be off, to either side.
        stages: the pipeline stages.
        assumptions: what was neither given nor read, a line each.
        reasons: why it does not fit, a line each; empty where it does.
        kept_back_bytes: what the pool is smaller by than the parts leave, as starts of other
            versions and GPUs took beyond theirs.
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

    @property
    def fits(self) -> bool:
        """Whether the engine would start with these settings."""
        return not self.reasons

    @property
    def margin_bytes(self) -> int:
        """What the pool has beyond one request of the full length, on the stage with the least."""
        return min(stage.pool_bytes - stage.needed_bytes for stage in self.stages)

    @property
    def has_margin(self) -> bool:
        """Whether it still fits when the pool is smaller by its uncertainty; a pool set in bytes is
        certain.
        """
        set_in_bytes = self.settings.kv_cache_memory_bytes is not None
        return self.fits and (set_in_bytes or self.margin_bytes >= self.uncertainty_bytes)
