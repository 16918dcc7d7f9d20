"""Compute the transient peak that vLLM reserves before it sizes the KV cache.

The peak is the sampler's or the MLP's, whichever is larger: ``max(bytes_per_logit * R * V +
sampler_base, T * (3 * I + 2 * H) * element + step_base) + workspace``. R is max_num_seqs, V the
vocabulary, T max_num_batched_tokens, I the MLP's width and H the hidden size. With a persistent
workspace for experts, attention adds to it, and takes more than such a model's MLP. constants.toml
has the constants by version and model runner, with their sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from packaging.version import Version

from oomguard.estimate.constants import constant, rows_of, since, tables
from oomguard.estimate.model.layer_caches import layer_kinds
from oomguard.estimate.model.quantization import is_repacked, quantization_config
from oomguard.estimate.model.shape import ModelShape, is_count

# The elements per token in a layer besides hidden states and MLP: attention's tensors, and the
# inputs of eight-bit experts.

_DELTA = (
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
)


def mixer_elements(shape: ModelShape, ranks: int) -> int:
    """Return the elements of the largest attention on one rank.

    Attention has queries, keys, values and its output. A gated delta rule has both projections'
    keys and values, its output and that output's norm; its kernels do not run while vLLM profiles a
    start. Latent attention has a separate formula below. Source: forward of GatedDeltaNetAttention
    in vllm/model_executor/layers/mamba/gdn_linear_attn.py, 0.20.

    Args:
        shape: the model's numbers.
        ranks: the number of ranks that share its heads.
    """
    kinds = set(layer_kinds(shape))
    if shape.number("kv_lora_rank"):
        attention = 0
    else:
        attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    delta = 0
    if "delta" in kinds:
        key_heads, key, value_heads, value = (shape.number(name) or 0 for name in _DELTA)
        delta = 2 * key_heads * key + 4 * value_heads * value
    return -(-max(attention, delta) // ranks)


def fp8_inputs(shape: ModelShape, ranks: int) -> int:
    """Return the bytes per token for the input copies of FP8 experts.

    The layer's input and each expert's product have a copy. Source: fused_experts_impl in
    vllm/model_executor/layers/fused_moe/fused_moe.py, 0.6 to 0.20. A start of 0.20 printed 163 kB
    for each additional token of a step, equal to the formula.

    Args:
        shape: the model's numbers.
        ranks: the number of ranks that share each expert.
    """
    config = quantization_config(shape) or {}
    chosen = shape.number("num_experts_per_tok") or 0
    if config.get("quant_method") != "fp8" or (shape.number("num_experts") or 0) <= 1:
        return 0
    width = shape.number("moe_intermediate_size") or shape.number("intermediate_size") or 0
    return shape.hidden + chosen * -(-width // ranks)


# Fused experts and sparse attention share one workspace, as large as the larger request.
#
# Sources: vllm/model_executor/layers/fused_moe and v1/worker/workspace.py (0.12 to 0.33);
# v1/attention/backends/mla and model_executor/layers/sparse_attn_indexer.py (0.13 to 0.33).

# A sparse attention's indexer stores keys as one byte per element, with a four-byte scale per 128
# elements.
_SCALED_ELEMENTS: Final = 128
_SCALE_BYTES: Final = 4


def workspace_bytes(
    shape: ModelShape, version: Version, *, step_tokens: int, longest_tokens: int, expert_ranks: int
) -> int:
    """Return the bytes of the shared workspace on one rank.

    Args:
        shape: the model's numbers.
        version: vLLM's version.
        step_tokens: tokens of one step.
        longest_tokens: the longest request.
        expert_ranks: the number of ranks that share each expert; 1 if no expert is split.
    """
    return max(
        _experts(shape, version, step_tokens, expert_ranks),
        _indexer(shape, version, longest_tokens),
    )


def _experts(shape: ModelShape, version: Version, step_tokens: int, ranks: int) -> int:
    """Return the workspace of the fused experts: one activation per token and chosen expert."""
    experts = shape.number("num_experts") or 0
    chosen = shape.number("num_experts_per_tok") or 0
    if experts <= 1 or not chosen:
        return 0
    width = -(
        -(shape.number("moe_intermediate_size") or shape.number("intermediate_size") or 0) // ranks
    )
    if since("modular_experts_since", version):
        second = max(width, shape.hidden)
    else:
        second = width
    return step_tokens * chosen * (max(2 * width, shape.hidden) + second) * shape.dtype_bytes


def has_indexer(shape: ModelShape) -> bool:
    """Return whether attention is sparse: an indexer chooses the keys."""
    return bool(shape.number("index_head_dim") and shape.number("index_topk"))


def _indexer(shape: ModelShape, version: Version, longest_tokens: int) -> int:
    """Return the workspace of a sparse attention's indexer for the keys of several longest
    requests.
    """
    dim = shape.number("index_head_dim") or 0
    if not has_indexer(shape):
        return 0
    rule = constant("indexer_requests", version)
    long = longest_tokens > rule.get("long_tokens", longest_tokens)
    if long:
        requests = rule["requests_of_long"]
    else:
        requests = rule["requests"]
    return (
        int(requests)
        * (longest_tokens // compressed(shape))
        * (dim + _SCALE_BYTES * -(-dim // _SCALED_ELEMENTS))
    )


def compressed(shape: ModelShape) -> int:
    """Return the number of tokens per indexer key in models whose layers compress.

    Only the smallest ratio has an indexer; the layers with other ratios attend to all keys. Source:
    vllm/models/deepseek_v4/attention.py of 0.25.
    """
    ratios = shape.config.get("compress_ratios")
    if isinstance(ratios, list):
        found = [ratio for ratio in ratios if is_count(ratio) and ratio > 1]
    else:
        found = []
    return min(found, default=1)


# vLLM's two model runners profile different things and have different numbers of steps in flight.


def model_runner(version: Version, shape: ModelShape) -> int:
    """Return the version's default model runner, 1 or 2.

    oomguard does not know the engine's ``VLLM_USE_V2_MODEL_RUNNER``.
    """
    if since("second_runner_since", version):
        return 2
    for row in rows_of("second_runner", version):
        if row["types"]:
            wanted = shape.model_type in row["types"]
        else:
            wanted = _is_dense(shape)
        plain = row["quantized"] or quantization_config(shape) is None
        if wanted and plain and not shape.has_encoder:
            return 2
        return 1
    return 1


def _is_dense(shape: ModelShape) -> bool:
    return (shape.number("num_experts") or 0) <= 1 and set(layer_kinds(shape)) <= {
        "full",
        "sliding",
    }


# prompt_logprobs in the first model runner: logits, their fp32 copy if in half precision, and their
# log-softmax in fp32. That is 10 bytes per logit in bf16 and 8 in fp32, plus 4 for an earlier
# prompt of the step. Measured on the CPU: 2.98 GiB, by this formula 2.93. The second runner
# processes a fixed number of tokens at once (vllm/v1/worker/gpu/sample/prompt_logprob.py).
_FLOAT32_BYTES = 4
_PROMPT_LOGPROBS_CHUNK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class ActivationPeak:
    """Report the bytes of the peak and of each candidate for it.

    Attributes:
        bytes: the peak.
        sampler_bytes: the sampler's peak in the start's profile; 0 on a stage without sampler.
        step_bytes: the MLP's peak in one step.
        workspace_bytes: the workspace of experts and sparse attention.
        uncertainty_bytes: the uncertainty of the peak in both directions.
        sampling_bytes: the sampler's peak at its first full use. No start reserves the part above
            the profiled peak.
        compile_bytes: the part of the peak that only a start with an empty compile cache has.
        pinned_bytes: freed memory that such a start may count in addition to the peak.
        saved_bytes: by how much the peak is smaller if vLLM samples with FlashInfer, which an
            installed package decides in some versions.
    """

    bytes: int
    sampler_bytes: int
    step_bytes: int
    workspace_bytes: int
    uncertainty_bytes: int
    sampling_bytes: int
    compile_bytes: int = 0
    pinned_bytes: int = 0
    saved_bytes: int = 0


def peak_activation(
    shape: ModelShape,
    version: Version,
    *,
    rows: int,
    step_tokens: int,
    tensor_parallel_size: int = 1,
    first_stage: bool = True,
    last_stage: bool = True,
    longest_tokens: int = 0,
    whole_experts: bool = False,
    eager: bool = False,
    changed: Mapping[str, float] | None = None,
) -> ActivationPeak:
    """Compute the activation peak of one rank.

    Args:
        shape: the model's numbers.
        version: vLLM's version.
        rows: requests in the sampler's profile.
        step_tokens: tokens of one step.
        tensor_parallel_size: the number of ranks that share each layer.
        first_stage: whether the rank is on the first pipeline stage.
        last_stage: whether it is on the last one, which samples.
        longest_tokens: the longest request.
        whole_experts: whether a rank has whole experts (expert parallelism) instead of a share of
            each.
        eager: whether the engine compiles nothing (``enforce_eager``). Versions that never compile
            need no flag.
        changed: constants that replace those in the data file, for fitting them; None for none.
    """
    row = constant("activations", version, runner=model_runner(version, shape)) | dict(
        changed or {}
    )
    element = shape.dtype_bytes
    rows = min(rows, step_tokens)
    if last_stage:
        sampler = round(row["bytes_per_logit"] * rows * shape.vocab) + row["sampler_base_bytes"]
    else:
        sampler = 0
    width = -(-_mlp_width(shape) // tensor_parallel_size)
    if whole_experts:
        experts = 1
    else:
        experts = tensor_parallel_size
    streams = shape.number("hc_mult") or 0  # hyper-connections keep so many residuals
    states = _hidden_states(version, tensor_parallel_size, eager=eager) + streams
    states *= shape.hidden
    token = (states + _mlp_elements(shape, version, width, eager=eager)) * element + fp8_inputs(
        shape, experts
    )
    if since("kept_workspace_since", version):
        token = max(token, (states + mixer_elements(shape, tensor_parallel_size)) * element)
    step = step_tokens * token + row["step_base_bytes"]
    step = max(
        step, _attention(shape, version, rows, step_tokens, longest_tokens, tensor_parallel_size)
    )
    if has_indexer(shape):
        held = 2 * step_tokens * shape.hidden * element
        step = max(step, constant("indexer_logits", version)["bytes"] + held)
    handed = constant("pipeline", version)["tensors"] * step_tokens * shape.hidden * element
    step += handed * ((not first_stage) + (not last_stage))
    if last_stage and not first_stage:
        sampler += handed  # the input from the previous stage has a persistent buffer
    workspace = workspace_bytes(
        shape,
        version,
        step_tokens=step_tokens,
        longest_tokens=longest_tokens,
        expert_ranks=experts,
    )
    kept = since("kept_workspace_since", version)

    def peak_with(sampler_bytes: int) -> int:
        if kept:
            return int(max(sampler_bytes, step)) + workspace
        return int(max(sampler_bytes, step + workspace))

    total = peak_with(sampler)
    lighter = row.get("bytes_per_logit_of_flashinfer", row["bytes_per_logit"])
    saved = total - peak_with(round(sampler * lighter / row["bytes_per_logit"]))
    unprofiled = round(float(row.get("unprofiled_bytes_per_logit", 0)) * rows * shape.vocab)
    if last_stage:
        sampling = sampler + unprofiled + (workspace if kept else 0)
    else:
        sampling = 0
    return ActivationPeak(
        total,
        sampler,
        step,
        workspace,
        round(row["uncertainty_ratio"] * total),
        sampling,
        saved_bytes=saved,
    )


def _is_compiled(version: Version, *, eager: bool) -> bool:
    return not eager and since("compiled_since", version)


def _hidden_states(version: Version, ranks: int, *, eager: bool) -> int:
    """Return the number of hidden states per token at the peak.

    A compiled step has two at once. An eager step has three while the last projection runs: the
    residual, the layer's input and its output. The all-reduce of several ranks adds another.
    """
    if _is_compiled(version, eager=eager):
        return 2
    if ranks == 1:
        return 3
    return 4


def _mlp_elements(shape: ModelShape, version: Version, width: int, *, eager: bool) -> int:
    """Return the elements per token in the MLP: its two inputs and its product.

    In some versions Marlin's kernels also allocate their input.
    """
    repacked = (
        not _is_compiled(version, eager=eager)
        and is_repacked(shape)
        and not since("marlin_copies_until", version)
    )
    return (4 if repacked else 3) * width


def _mlp_width(shape: ModelShape) -> int:
    """Return the width of the dense MLP, or of the shared experts if no layer has a dense one."""
    experts = shape.number("num_experts") or 0
    if experts > 1:
        shared = shape.number("shared_expert_intermediate_size") or 0
        moe = shape.number("moe_intermediate_size") or 0
        if shape.number("first_k_dense_replace"):
            dense = shape.number("intermediate_size") or 0
        else:
            dense = 0
        return max(shared, moe * (shape.number("n_shared_experts") or 0), dense)
    return shape.number("intermediate_size") or 4 * shape.hidden


def _attention(
    shape: ModelShape,
    version: Version,
    rows: int,
    step_tokens: int,
    longest_tokens: int,
    ranks: int,
) -> int:
    """Return the peak in a latent attention layer, which expands vectors to keys and values.

    Returns 0 for other layers.
    """
    if not shape.number("kv_lora_rank") or not since("latent_profile_since", version):
        return 0
    names = ("qk_nope_head_dim", "v_head_dim")
    dims = sum(shape.number(name) or 0 for name in names)
    block = int(tables()["defaults"]["cuda_block_tokens"])
    most = int(tables()["defaults"]["latent_profile_tokens"])
    tokens = max(min(max(8 * longest_tokens, 4 * rows * block), most), rows * block)
    unfolded = tokens * -(-shape.heads // ranks) * dims
    return (unfolded + 2 * step_tokens * shape.hidden) * shape.dtype_bytes


def prompt_logprobs_bytes(
    shape: ModelShape, version: Version, step_tokens: int, longest_tokens: int, device: str = "cuda"
) -> int:
    """Return the additional bytes of prompt log-probabilities, which no start reserves.

    Args:
        shape: the model's numbers.
        version: vLLM's version.
        step_tokens: tokens of one step.
        longest_tokens: tokens of the longest prompt, because the engine processes prompt by prompt.
        device: vLLM's backend. The CPU has no Triton, so it uses the first runner.
    """
    if device != "cpu" and since("second_runner_since", version):
        return min(step_tokens, _PROMPT_LOGPROBS_CHUNK_TOKENS) * shape.vocab * shape.dtype_bytes
    tokens = min(step_tokens, longest_tokens)
    before = min(
        tokens, step_tokens - tokens
    )  # the previous prompt's log-softmax lives until the next one is ready
    if shape.dtype_bytes < _FLOAT32_BYTES:
        copied = _FLOAT32_BYTES
    else:
        copied = 0
    return shape.vocab * (
        tokens * (shape.dtype_bytes + copied + _FLOAT32_BYTES) + before * _FLOAT32_BYTES
    )
