"""Settings that vLLM refuses before it looks at memory: ranks that do not divide, lengths and blocks that the model cannot have."""

from __future__ import annotations

from oomguard.errors import SettingError
from oomguard.memory.constants import since, tables
from oomguard.memory.model.layer_caches import keeps_latent
from oomguard.memory.model.shape import ModelShape
from oomguard.memory.vllm.start import VllmSettings
from oomguard.observe.processor import has_matrix_tiles


def refuse_impossible(settings: VllmSettings, shape: ModelShape) -> None:
    """Raise SettingError for what the engine refuses; ``settings`` have all defaults filled in."""
    if settings.gpu_total_bytes <= 0:
        raise SettingError("a GPU of 0 bytes holds nothing", hint="--gpu-memory 24GiB")
    _check_ranks(settings, shape)
    tokens, rows, length = settings.max_num_batched_tokens or 0, settings.max_num_seqs or 0, settings.max_model_len or 0
    if tokens < rows:
        raise SettingError(f"max_num_batched_tokens is {tokens}, less than max_num_seqs {rows}")
    multiple = block_multiple_tokens(settings, shape)
    if settings.block_size and settings.block_size % multiple and since("block_multiple_since", settings.version):
        raise SettingError(
            f"block_size is {settings.block_size}", hint=f"attention takes multiples of {multiple} tokens"
        )
    if shape.max_positions is not None and length > max(shape.max_positions, shape.default_length or 0):
        raise SettingError(
            f"max_model_len is {length}, the model is for {shape.max_positions}",
            hint="vLLM refuses it unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set",
        )


def _check_ranks(settings: VllmSettings, shape: ModelShape) -> None:
    ranks, stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
    if stages > shape.layers:
        raise SettingError(f"pipeline_parallel_size is {stages}, the model has {shape.layers} layers")
    _check_context_ranks(settings, shape)
    attends = "num_attention_heads" in shape.config or shape.heads > 1
    if attends and shape.heads % ranks:
        raise SettingError(f"tensor_parallel_size is {ranks}, which does not divide the {shape.heads} attention heads")
    if attends and not keeps_latent(shape) and shape.kv_heads % ranks and ranks % shape.kv_heads:
        raise SettingError(
            f"tensor_parallel_size is {ranks}, neither a divisor nor a multiple of the {shape.kv_heads} key-value heads"
        )


def _check_context_ranks(settings: VllmSettings, shape: ModelShape) -> None:
    """Raise SettingError for ranks that cannot share a request's tokens (config/parallel.py and config/model.py, 0.20 to 0.32)."""
    context, ranks = settings.decode_context_parallel_size, settings.tensor_parallel_size
    if ranks % context:
        raise SettingError(
            f"decode_context_parallel_size is {context}, which does not divide tensor_parallel_size {ranks}",
            hint="it takes no GPUs of its own: it splits the ranks that hold the same key-value heads",
        )
    if context > 1 and not keeps_latent(shape):
        most, queries = ranks // shape.kv_heads, shape.heads // shape.kv_heads
        if context > most or queries % context:
            raise SettingError(
                f"decode_context_parallel_size is {context}: {most} of {ranks} ranks hold the same key-value heads of {shape.kv_heads}",
                hint=f"at most {most}, and a divisor of the {queries} queries of each",
            )


def has_latent_blocks(settings: VllmSettings, shape: ModelShape) -> bool:
    """Return whether a CPU's kernel takes a latent cache in blocks of its own size: on AMX it does not (vllm/platforms/cpu.py)."""
    return keeps_latent(shape) and not (since("latent_tiles_since", settings.version) and has_matrix_tiles())


def block_multiple_tokens(settings: VllmSettings, shape: ModelShape) -> int:
    """Return the tokens of which a block of the KV cache holds a whole multiple, by backend and attention."""
    if settings.device == "cuda":
        name = "cuda_block_multiple_tokens"
    else:
        name = "cpu_latent_block_tokens" if has_latent_blocks(settings, shape) else "cpu_block_multiple_tokens"
    return int(tables()["defaults"][name])
