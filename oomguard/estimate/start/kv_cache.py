"""Compute vLLM's KV cache layout: groups of layers, blocks, tokens and concurrency.

All groups take equal blocks from one pool, so a model with several kinds of layers stores fewer
tokens than the sum over its layers. Source: get_kv_cache_groups, unify_kv_cache_spec_page_size,
get_kv_cache_config_from_groups and get_max_concurrency_for_kv_cache_config in
vllm/v1/core/kv_cache_utils.py (0.32; kv_cache_planning.py in 0.33), CrossAttentionSpec in
vllm/v1/kv_cache_interface.py, and Platform._align_hybrid_block_size in vllm/platforms/interface.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from oomguard.core.errors import SettingError
from oomguard.estimate.constants import since, tables
from oomguard.estimate.model.layer_caches import (
    LayerCache,
    compressed_caches,
    is_compressed,
    layer_caches,
)
from oomguard.estimate.model.model import Model, element_bytes
from oomguard.estimate.model.quantization import quantizes_cache
from oomguard.estimate.model.shape import ModelShape
from oomguard.estimate.start.activations import model_runner
from oomguard.estimate.start.start import VllmSettings, has_latent_blocks
from oomguard.estimate.start.weights import stage_layers

# If the largest group of layers has at most this many times the layers of the smallest, vLLM pads
# the smaller groups.
_PAD_UP_TO_RATIO: Final = 1.5
# A latent cache next to states uses multiples of this many tokens (MLA decode kernels).
_LATENT_HYBRID_TOKENS: Final = 128


@dataclass(frozen=True, slots=True)
class KvSettings:
    """Hold the inputs of the layout: block size, longest request, tokens in flight, draft tokens.

    ``encoded_tokens`` is the cross-attention cache of one request; vLLM assumes a step's tokens.
    With ``cached_states`` prefix caching is on, and a request also stores the state before its last
    block. ``context_ranks`` share the tokens of a request, and each has as many blocks
    (FullAttentionSpec.max_memory_usage_bytes, 0.10.2 to 0.32).
    """

    block_tokens: int
    max_model_len: int
    in_flight_tokens: int
    cached_states: bool = False
    draft_tokens: int = 0
    encoded_tokens: int = 0
    context_ranks: int = 1


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Describe layers that share one block table.

    ``pages_bytes`` is each layer's block with ``block_tokens`` tokens.
    """

    kind: str
    layers: tuple[int, ...]
    pages_bytes: tuple[int, ...]
    block_tokens: int
    window_tokens: int = 0
    checkpoints: int = 0

    def block_bytes(self, stage: Collection[int] | None = None) -> int:
        """Return the bytes of one block in all its layers, or in a pipeline stage's."""
        if stage is None:
            return sum(self.pages_bytes)
        total = 0
        for layer, page in zip(self.layers, self.pages_bytes, strict=True):
            if layer in stage:
                total += page
        return total

    def request_blocks(self, settings: KvSettings) -> int:
        """Count the blocks of one request of the full length."""
        length = settings.max_model_len
        if self.kind == "state":
            return settings.draft_tokens + (2 + self.checkpoints if settings.cached_states else 1)
        if self.kind == "cross":
            return -(-settings.encoded_tokens // self.block_tokens)
        if self.kind == "sliding":
            held = min(self.window_tokens - 1 + settings.in_flight_tokens, length)
            return -(-held // self.block_tokens) + 1  # a window can begin in the middle of a block
        if self.kind == "chunked":
            return -(
                -min(self.window_tokens + settings.in_flight_tokens, length) // self.block_tokens
            )
        own_tokens = -(-length // settings.context_ranks)
        return -(-own_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Hold the groups of a model under one engine's settings."""

    groups: tuple[LayerGroup, ...]
    settings: KvSettings

    @property
    def block_tokens(self) -> int:
        """Return the tokens per attention block; with several kinds of layers the smallest."""
        sizes = []
        for group in self.groups:
            if group.kind != "state":
                sizes.append(group.block_tokens)
        return min(sizes, default=self.settings.block_tokens)

    def block_bytes(self, stage: Collection[int] | None = None) -> int:
        """Return the bytes of one block in a rank's pool, by the widest group."""
        return max((group.block_bytes(stage) for group in self.groups), default=0)

    def request_blocks(self, max_model_len: int | None = None) -> int:
        """Count the blocks of one request of the full length, over all groups."""
        if max_model_len is None:
            settings = self.settings
        else:
            settings = replace(self.settings, max_model_len=max_model_len)
        return sum(group.request_blocks(settings) for group in self.groups)

    def blocks(self, pool_bytes: int, stage: Collection[int] | None = None) -> int:
        """Count the blocks in a pool, including vLLM's own null block."""
        size = self.block_bytes(stage)
        if size:
            return max(0, pool_bytes) // size
        return 0

    def max_concurrency(self, blocks: int) -> float:
        """Return the number of requests of the full length that fit at once."""
        each = self.request_blocks()
        if each:
            return blocks / each
        return 0.0

    def tokens(self, blocks: int) -> int:
        """Return the tokens in the engine's log: concurrency times length."""
        return int(self.max_concurrency(blocks) * self.settings.max_model_len)

    def tokens_of_groups(self, blocks: int) -> int:
        """Return the tokens in earlier versions' logs: blocks divided by the number of groups.

        These versions ignore how many blocks a request takes from each group.
        """
        shortest = min((group.block_tokens for group in self.groups), default=0)
        if self.groups:
            return blocks // len(self.groups) * shortest * self.settings.context_ranks
        return 0

    def request_bytes(
        self, max_model_len: int | None = None, stage: Collection[int] | None = None
    ) -> int:
        """Return the pool bytes that one request of a length needs, without the null block."""
        return self.request_blocks(max_model_len) * self.block_bytes(stage)

    def fits(
        self,
        pool_bytes: int,
        max_model_len: int | None = None,
        stage: Collection[int] | None = None,
    ) -> bool:
        """Return whether one request of the length fits next to the null block."""
        return self.request_bytes(max_model_len, stage) <= pool_bytes - self.block_bytes(stage)

    def longest(self, pool_bytes: int, limit: int, stage: Collection[int] | None = None) -> int:
        """Return the longest request up to ``limit`` tokens that fits, or 0."""
        low = 0
        high = limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.fits(pool_bytes, middle, stage) else (low, middle - 1)
            )
        return low


def lay_out(caches: Iterable[LayerCache], settings: KvSettings) -> KvLayout:
    """Lay out a rank's layer caches in groups, with vLLM's final block size."""
    layers = tuple(caches)
    if any(layer.block_tokens for layer in layers):
        return KvLayout(_packed_groups(layers), settings)
    settings, page_of_state = _align(layers, settings)
    pages = [_page(layer, settings.block_tokens, page_of_state) for layer in layers]
    if _one_kind(layers):
        return KvLayout(_one_group(layers, pages, settings), settings)
    return KvLayout(_equal_groups(_unified(layers, pages, settings)), settings)


def _packed_groups(layers: tuple[LayerCache, ...]) -> tuple[LayerGroup, ...]:
    """Form groups of layers that set their own blocks; every block is as wide as the widest group.

    Layers of all tokens are one group. Kinds of windows that are wider are split into groups that
    are not. Source: _get_packed_kv_cache_groups in vllm/v1/core/kv_cache_utils.py, 0.32.
    """
    buckets: dict[tuple[str, int, int], list[LayerCache]] = {}
    for layer in layers:
        key = (layer.kind, layer.window_tokens, layer.block_tokens)
        buckets.setdefault(key, []).append(layer)
    widest = 0
    for (kind, _, _), own in buckets.items():
        if kind == "full":
            widest = max(widest, sum(cache.page_bytes for cache in own))
    groups = []
    for (kind, window, block), own in buckets.items():
        size = sum(cache.page_bytes for cache in own)
        number = -(-size // widest) if widest else 1
        for i in range(number):
            members = own[i::number]
            indices = tuple(cache.index for cache in members)
            pages = tuple(cache.page_bytes for cache in members)
            groups.append(LayerGroup(kind, indices, pages, block, window))
    return tuple(groups)


def _align(layers: tuple[LayerCache, ...], settings: KvSettings) -> tuple[KvSettings, int | None]:
    """Grow the blocks of a hybrid model until an attention page can store a state.

    vLLM pads states to that page.
    """
    attention = []
    states = []
    for layer in layers:
        if layer.kind == "state":
            states.append(layer.state_bytes)
        else:
            attention.append(layer)
    if not attention or not states:
        return settings, None
    token_bytes = attention[0].token_bytes
    step = settings.block_tokens
    if any(layer.latent for layer in attention):
        step = max(step, _LATENT_HYBRID_TOKENS)
    block = step * -(-max(states) // (step * token_bytes))
    block = max(block, settings.block_tokens)
    return replace(settings, block_tokens=block), block * token_bytes


def _page(layer: LayerCache, block_tokens: int, page_of_state: int | None) -> int:
    if layer.kind == "state":
        return page_of_state or layer.state_bytes
    return layer.token_bytes * block_tokens


def _one_kind(layers: tuple[LayerCache, ...]) -> bool:
    """Return whether all layers need the same number of blocks, whatever their widths."""
    kinds = {(layer.kind, layer.window_tokens) for layer in layers}
    if len(kinds) != 1:
        return not kinds
    return layers[0].kind != "state" or len({layer.state_bytes for layer in layers}) == 1


def _one_group(
    layers: tuple[LayerCache, ...], pages: list[int], settings: KvSettings
) -> tuple[LayerGroup, ...]:
    if not layers:
        return ()
    first = layers[0]
    indices = tuple(layer.index for layer in layers)
    return (
        LayerGroup(
            first.kind,
            indices,
            tuple(pages),
            settings.block_tokens,
            first.window_tokens,
            first.checkpoints,
        ),
    )


def _unified(
    layers: tuple[LayerCache, ...], pages: list[int], settings: KvSettings
) -> list[tuple[LayerCache, int, int]]:
    """Return each layer with its page and block size.

    Smaller pages get more tokens until all are as wide as the widest.
    """
    widest = max(pages)
    rows = []
    for layer, page in zip(layers, pages, strict=True):
        grows = layer.kind != "state" and widest % page == 0
        rows.append((layer, widest, settings.block_tokens * (widest // page if grows else 1)))
    return rows


def _equal_groups(rows: list[tuple[LayerCache, int, int]]) -> tuple[LayerGroup, ...]:
    """Form groups of equally many layers.

    Each has as many layers as the rarest kind, or the most frequent one if they are close.
    """
    buckets: dict[tuple[str, int, int, int, int], list[int]] = {}
    for layer, _, block in rows:
        if layer.kind == "state":
            width = layer.state_bytes
        else:
            width = layer.token_bytes
        key = (layer.kind, layer.window_tokens, width, block, layer.checkpoints)
        buckets.setdefault(key, []).append(layer.index)
    page = rows[0][1]
    counts = [len(indices) for indices in buckets.values()]
    if max(counts) < min(counts) * _PAD_UP_TO_RATIO:
        size = max(counts)
    else:
        size = min(counts)
    groups = []
    for (kind, window, _, block, checkpoints), indices in buckets.items():
        number = -(-len(indices) // size)
        for i in range(number):
            members = tuple(indices[i::number])
            groups.append(
                LayerGroup(kind, members, (page,) * len(members), block, window, checkpoints)
            )
    return tuple(groups)


# The KV cache of a start before its pool is known, including the draft's layers.

# A cache with own scales has a four-byte one for each token and head; nearly all heads have 128
# elements. A latent vector of fp8_ds_mla has 512 elements of a byte, a scale for 128 each, and 64
# of rotary positions in half precision (v1/attention/backends/mla of 0.32).
_SCALED: Final = 1 + 4 / 128
KV_ELEMENT_BYTES: Final = {
    "fp8_ds_mla": (512 + 4 * 512 / 128 + 2 * 64) / (512 + 64),
    "fp8_per_token_head": _SCALED,
    "int8_per_token_head": _SCALED,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float32": 4.0,
}


@dataclass(frozen=True, slots=True)
class StartCaches:
    """Hold the layout of a rank's KV cache and the layers of each pipeline stage.

    A draft is on the last stage.
    """

    caches: tuple[LayerCache, ...]
    layout: KvLayout
    stages: tuple[frozenset[int], ...]

    def token_bytes(self, layers: Collection[int]) -> int:
        """Return the bytes of one token in ``layers``.

        Sliding and chunked layers store only the last tokens.
        """
        total = 0
        for cache in self.caches:
            # Cross attention stores the encoder's tokens, which a request's length does not change.
            if cache.index in layers and cache.kind != "cross":
                total += cache.token_bytes
        return total


def start_caches(model: Model, settings: VllmSettings) -> StartCaches:
    """Lay out the KV cache of one rank.

    Raises:
        ConfigError: a number of the model's configuration is absurd.
        SettingError: ``kv_cache_dtype`` or ``mamba_ssm_cache_dtype`` is unknown.
    """
    caches = _caches(model.shape, settings) + _draft_caches(model, settings)
    layers = model.shape.layers
    parts = [frozenset(part) for part in stage_layers(layers, settings.pipeline_parallel_size)]
    # The last stage also runs the draft, whose layers follow the target's in number.
    drafts = set()
    for cache in caches:
        if cache.index >= layers:
            drafts.add(cache.index)
    stages = (*parts[:-1], parts[-1] | drafts)
    return StartCaches(caches, lay_out(caches, _kv_settings(model, settings, caches)), stages)


def _caches(shape: ModelShape, settings: VllmSettings) -> tuple[LayerCache, ...]:
    if settings.kv_cache_dtype == "auto":
        element: float = 1.0 if quantizes_cache(shape) else shape.dtype_bytes
    elif settings.kv_cache_dtype in KV_ELEMENT_BYTES:
        element = KV_ELEMENT_BYTES[settings.kv_cache_dtype]
    else:
        raise SettingError(
            f"kv_cache_dtype {settings.kv_cache_dtype!r} is not known",
            hint=f"one of auto, {', '.join(KV_ELEMENT_BYTES)}",
        )
    found = layer_caches(
        shape,
        kv_element_bytes=element,
        tensor_parallel_size=settings.tensor_parallel_size,
        state_dtype_bytes=_state_bytes(settings),
        latent=since("latent_cache_since", settings.version),
    )
    kept = since("state_checkpoints_since", settings.version)
    if kept:
        return found
    return tuple(replace(cache, checkpoints=0) for cache in found)


def _state_bytes(settings: VllmSettings) -> int | None:
    """Return the bytes per element of a recurrent state, or None for the model's own type.

    The CPU backend uses float32 if its processor multiplies bfloat16 (vllm/platforms/cpu.py, 0.32).
    """
    if settings.mamba_ssm_cache_dtype != "auto":
        return element_bytes(settings.mamba_ssm_cache_dtype)
    if settings.device == "cpu":
        from oomguard.probe.host import multiplies_in_bfloat16

        if multiplies_in_bfloat16():
            return 4
    return None


def _draft_caches(model: Model, settings: VllmSettings) -> tuple[LayerCache, ...]:
    """Return the caches of a draft model or MTP layers, numbered after the target's own."""
    if model.speculation is None:
        return ()
    first = model.shape.layers
    if model.draft is not None:
        found = []
        for cache in _caches(model.draft.shape, settings):
            found.append(replace(cache, index=first + cache.index))
        return tuple(found)
    if not model.speculation.uses_mtp_layers:
        return ()
    if is_compressed(model.shape):
        return compressed_caches(model.shape, model.shape.layers)
    number = model.shape.number("num_nextn_predict_layers") or 1
    for cache in reversed(_caches(model.shape, settings)):
        if cache.kind == "full":
            return tuple(replace(cache, index=first + i) for i in range(number))
    return ()


def _kv_settings(
    model: Model, settings: VllmSettings, caches: tuple[LayerCache, ...]
) -> KvSettings:
    cached = settings.enable_prefix_caching
    if cached is None:
        cached = since("hybrid_prefix_caching_since", settings.version)
    if settings.enable_prefix_caching is None and all(cache.kind == "state" for cache in caches):
        cached = False  # for a model without attention vLLM caches prefixes only on request
    return KvSettings(
        settings.block_size or _default_block_tokens(settings, model.shape),
        settings.max_model_len or 0,
        _steps_in_flight(settings, model.shape) * (settings.max_num_batched_tokens or 0),
        cached,
        0 if model.speculation is None else model.speculation.tokens,
        settings.max_num_batched_tokens or 0,
        settings.decode_context_parallel_size,
    )


def _default_block_tokens(settings: VllmSettings, shape: ModelShape) -> int:
    known = tables()["defaults"]
    if settings.device == "cuda":
        return int(known["cuda_block_tokens"])
    return int(
        known[
            "cpu_latent_block_tokens" if has_latent_blocks(settings, shape) else "cpu_block_tokens"
        ]
    )


def _steps_in_flight(settings: VllmSettings, shape: ModelShape) -> int:
    """Count the scheduled steps whose tokens a window stores too (config/vllm.py, 0.32).

    There is one per pipeline stage. A device adds one, except with the first runner and a pipeline.
    """
    stages = settings.pipeline_parallel_size
    if not since("steps_in_flight_since", settings.version):
        return 1
    if settings.device == "cpu" or (stages > 1 and model_runner(settings.version, shape) == 1):
        return stages
    return stages + 1
