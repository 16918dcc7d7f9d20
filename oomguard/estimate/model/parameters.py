"""List a model's parameters without its weights: built by transformers, or computed.

transformers needs seconds to import and build a model. A plan needs neither library if a layout of
layouts.toml covers the model type.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import ConfigError
from oomguard.core.files import cache_file, read_regular, read_tables, state_of, write_cache
from oomguard.estimate.model.files import Parameter
from oomguard.estimate.model.layer_caches import GEMMA4, layer_kinds
from oomguard.estimate.model.shape import FAMILIES, ModelShape, is_count

# transformers creates a module, a name or a row for every count in an untrusted file, without any
# limit. Ten billion layers would become a list of ten billion names, so oomguard checks first.

# Fields whose items transformers creates one by one, unlike widths and lengths in tokens.
_MADE: Final = re.compile(
    r"layer|depth|block|stage|expert|head|level|branch|codebook|stack|^n_|^num_"
)
_WIDTH: Final = re.compile(
    r"size|dim|width|token|length|positions|ctx|embd|embed|inner|vocab|channels|patch|_ids?$|params|parameters"
)
_MOST_MADE: Final = 2048
# The number of layers times experts in a mixture. The largest published models have some 25
# thousand.
_MOST_EXPERTS: Final = 100_000
_LAYERS: Final = re.compile(r"layers?$|^depth$")
_EXPERTS: Final = re.compile(r"experts$")
# No width, vocabulary or length in tokens is near this limit, but bases of rotary positions are.
_MOST: Final = 1 << 28
_BASE: Final = re.compile(r"theta|base")


def is_buildable(config: Mapping[str, Any]) -> bool:
    """Return whether transformers can build a configuration in reasonable time."""
    layers = experts = 1
    for name, value in _numbers(config):
        if not abs(value) < _MOST and not _BASE.search(name):
            return False
        if _MADE.search(name) and not _WIDTH.search(name) and value > _MOST_MADE:
            return False
        if _LAYERS.search(name):
            layers = max(layers, round(value))
        if _EXPERTS.search(name):
            experts = max(experts, round(value))
    return layers * experts <= _MOST_EXPERTS


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield each finite number at any depth with the name of its field or its list's field."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        name, value = left.pop()
        if isinstance(value, Mapping):
            left += value.items()
        elif isinstance(value, list):
            left += ((name, inner) for inner in value)
        elif isinstance(value, int) or (isinstance(value, float) and abs(value) < float("inf")):
            yield str(name), value


def build_on_meta(shape: ModelShape) -> tuple[Parameter, ...] | None:
    """Build every parameter with transformers on the meta device, which allocates nothing.

    A model of several parts includes all of them. Returns None if transformers is absent, does not
    know the model, or would never finish because of absurd counts.
    """
    if not is_buildable(shape.outer) or not is_transformers_here():
        return None

    def rows() -> list[Any]:
        return [[parameter.name, parameter.shape] for parameter in _build(shape)]

    # The same file is built in another way for another dtype, model type or part.
    about = [shape.outer, shape.config, shape.model_type, shape.dtype_bytes]
    found = _ask_transformers("parameters", about, rows)
    if found is None:
        return None
    return tuple(_parameter(name, tuple(size), shape) for name, size in found)


# Importing torch and transformers takes seconds, building a large mixture takes more. The answer
# depends only on the configuration, the installed versions and this file, so it stays on disk.

_MOST_CACHE_BYTES: Final = 1 << 26


def _ask_transformers(kind: str, about: object, answer: Callable[[], Any]) -> Any:
    """Return transformers' answer, from the cache if it answered the same question before.

    Returns None if transformers rejects the configuration.

    Args:
        kind: the kind of answer, for the name of the cache file.
        about: everything in the configuration that the answer depends on.
        answer: asks transformers; its result must be plain data.
    """
    code = [Path(__file__), *_library_files()]
    question = json.dumps(about, sort_keys=True, default=str).encode()
    path = cache_file(f"{kind}-{{}}.json", [question, *map(state_of, code)])
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return json.loads(read_regular(path, _MOST_CACHE_BYTES))
    from oomguard.core.log import get_logger  # a plan that finds its answer needs no log

    get_logger().warning(
        f"transformers builds this model once for its {kind}, which takes seconds; later plans "
        "read them from the cache",
        cache=str(path),
    )
    with _quiet():
        try:
            found = answer()
        except Exception as error:  # noqa: BLE001
            # Remote code, a new family, or fields of another version: the shape gives the counts.
            if isinstance(error, (OSError, MemoryError, ImportError)):
                return None  # another time it may succeed, so this is not kept
            found = None
    with contextlib.suppress(TypeError, ValueError):  # an answer that JSON cannot hold
        text = json.dumps(found)
        write_cache(path, text.encode())
        # The first answer must equal the later ones, and JSON changes tuples and numeric keys.
        return json.loads(text)
    return found


_DEFAULTS_FILE: Final = Path(__file__).with_name("family_defaults.json")


@functools.cache
def _family_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Return the counts that a file may leave to its family, as transformers 5.23 has them."""
    found: Mapping[str, Mapping[str, Any]] = json.loads(_DEFAULTS_FILE.read_text("utf-8"))
    return found


def fill_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with the counts that its family sets by default.

    Published files omit heads, layers, even the vocabulary. They come from a data file, else from
    transformers. The configuration returns unchanged if neither knows the model, or if
    transformers would never finish because of absurd counts.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return config
    known = _family_defaults().get(kind)
    if known is not None:
        return _with_defaults(known, config)
    if not is_buildable(config) or not is_transformers_here():
        return config
    filled = _ask_transformers("defaults", config, lambda: auto_config(config).to_dict())
    if not isinstance(filled, Mapping):
        return config
    return _merged(filled, config)


def _with_defaults(known: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that the file has, each with the family's counts for missing ones.

    Older files have the language model's numbers next to the parts instead of in a separate part.
    """
    found = {}
    for name, value in known.items():
        if not isinstance(value, Mapping):
            found[name] = value
    text = known.get("text_config")
    if isinstance(text, Mapping) and not isinstance(config.get("text_config"), Mapping):
        # The whole model's type selects its family, so the text's own type must not replace it.
        for name, value in text.items():
            if name != "model_type":
                found[name] = value
    found |= _without_nulls(config)
    for name, part in known.items():
        own = config.get(name)
        if isinstance(part, Mapping) and isinstance(own, Mapping):
            found[name] = {**part, **_without_nulls(own)}
    return found


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in config.items():
        if value is not None:
            found[name] = value
    return found


def _merged(filled: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configurations part by part; ``given`` takes precedence."""
    both = {**filled, **_without_nulls(given)}
    for name, value in given.items():
        if isinstance(value, Mapping) and isinstance(filled.get(name), Mapping):
            both[name] = _merged(filled[name], value)
    return both


def is_transformers_here() -> bool:
    """Return whether transformers and torch can be imported."""
    return len(_library_files()) == len(_LIBRARIES)


_LIBRARIES: Final = ("torch", "transformers")


def _library_files() -> list[Path]:
    """Return the first file of each library that is installed; an upgrade replaces it."""
    files = []
    for spec in map(importlib.util.find_spec, _LIBRARIES):
        if spec is not None and spec.origin is not None:
            files.append(Path(spec.origin))
    return files


_NO_FIELDS: Final = frozenset({"model_type", "quantization_config"})
# transformers loads code that these fields name: classes in files of the model or on the hub, and
# attention kernels on the hub (``attn_implementation`` accepts ORG/NAME).
_CODE_FIELDS: Final = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_internal",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "name_or_path",
    }
)


def auto_config(config: Mapping[str, Any]) -> Any:
    """Return transformers' configuration object, as for an unquantized model.

    The configuration is untrusted, so this function first removes fields that name code, at every
    depth.

    Raises:
        ConfigError: its counts are absurd, so building it would never finish.
        Exception: transformers itself rejects it.
    """
    if not is_buildable(config):
        raise ConfigError("its number of layers, experts or modules is larger than any model's")
    from transformers import AutoConfig

    fields = {}
    for name, value in config.items():
        if name not in _NO_FIELDS | _CODE_FIELDS:
            fields[name] = _without_code(value)
    return AutoConfig.for_model(config["model_type"], **fields)


def _without_code(value: Any) -> Any:
    """Return a value without the fields that name code, at any depth."""
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for name, inner in value.items():
            if name not in _CODE_FIELDS:
                found[name] = _without_code(inner)
        return found
    if isinstance(value, list):
        return [_without_code(inner) for inner in value]
    return value


def _build(shape: ModelShape) -> Iterator[Parameter]:
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSpeechSeq2Seq,
    )

    kind = AutoModelForCausalLM
    whole = dict(shape.config)
    if shape.model_type in FAMILIES["encoder_decoder"]:
        kind = AutoModelForSpeechSeq2Seq
        whole = dict(shape.outer)
    elif (
        shape.has_encoder
    ):  # the language model's part decides tying, whatever the outer class defaults to
        kind = AutoModelForImageTextToText
        whole = {**_loaded_part(shape.outer), "tie_word_embeddings": is_tied(shape)}
    whole["model_type"] = str(whole.get("model_type") or shape.model_type)
    with torch.device("meta"):
        model = kind.from_config(auto_config(whole), dtype=torch.bfloat16, trust_remote_code=False)
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in seen:  # count tied weights once
            seen.add(id(parameter))
            yield Parameter(name, tuple(parameter.shape), parameter.numel() * shape.dtype_bytes)


def _loaded_part(outer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that an engine loads.

    For a model that also speaks this is the thinker alone. Source:
    vllm/model_executor/models/qwen2_5_omni_thinker.py, 0.12 to 0.27.
    """
    part = outer.get("thinker_config")
    if isinstance(part, Mapping):
        return {"model_type": f"{outer.get('model_type')}_thinker", **part}
    return outer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' warnings about a configuration; they do not concern a plan."""
    logger = logging.getLogger("transformers")
    before = os.environ.get("TRANSFORMERS_VERBOSITY")
    level = logger.level
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if before is None:
            os.environ.pop("TRANSFORMERS_VERBOSITY", None)
        else:
            os.environ["TRANSFORMERS_VERBOSITY"] = before


def count_parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """Compute the parameters of a decoder from its shape.

    The result is a few percent off in most families and much more in some (``well_counted``).
    """
    rows = [_parameter("model.embed_tokens.weight", (shape.vocab, shape.hidden), shape)]
    if not is_tied(shape):
        rows.append(_parameter("lm_head.weight", (shape.vocab, shape.hidden), shape))
    kinds = layer_kinds(shape)
    for i, kind in enumerate(kinds):
        for name, size in _layer(shape, i, kind):
            rows.append(_parameter(f"model.layers.{i}.{name}", size, shape))
    return (*rows, _parameter("model.norm.weight", (shape.hidden,), shape))


def is_tied(shape: ModelShape) -> bool:
    """Return whether the head reuses the embedding, by the file or the type's default."""
    named = shape.config.get("tie_word_embeddings", shape.outer.get("tie_word_embeddings"))
    if named is None:
        return shape.model_type.startswith(tuple(FAMILIES["types"]["tied_by_default"]))
    return bool(named)


def is_count_accurate(shape: ModelShape) -> bool:
    """Return whether ``counted`` is accurate for this shape.

    It is for attention in every layer, one dense MLP, and no encoder.
    """
    plain = set(layer_kinds(shape)) <= {"full", "sliding", "chunked"} and not shape.has_encoder
    return (
        plain
        and not shape.config.get("block_configs")
        and (shape.number("num_experts") or 0) <= 1
        and not shape.number("kv_lora_rank")
    )


def _parameter(name: str, size: tuple[int, ...], shape: ModelShape) -> Parameter:
    return Parameter(name, size, prod(size) * shape.dtype_bytes)


def has_gate(shape: ModelShape) -> bool:
    """Return whether the MLP has a gate and an up projection before its activation."""
    return shape.model_type not in FAMILIES["types"]["two_matrices"]


def has_plain_activation(shape: ModelShape) -> bool:
    """Return whether the MLP has no gate and an activation that makes only one tensor."""
    activation = shape.config.get("hidden_act", shape.config.get("activation_function"))
    return not has_gate(shape) and activation in FAMILIES["types"]["plain_activations"]


def _layer(shape: ModelShape, index: int, kind: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = shape.hidden
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if kind.partition("+")[0] in {"full", "sliding", "chunked"} or "+" in kind or kind == "none":
        width = shape.heads * shape.head_dim
        kv = shape.kv_heads * shape.head_dim
        yield "self_attn.q_proj.weight", (width, hidden)
        yield "self_attn.k_proj.weight", (kv, hidden)
        yield "self_attn.v_proj.weight", (kv, hidden)
        yield "self_attn.o_proj.weight", (hidden, width)
    if kind.startswith(
        ("mamba", "delta", "conv", "kda")
    ):  # two or three projections of about twice the width
        yield "mixer.in_proj.weight", (4 * hidden, hidden)
        yield "mixer.out_proj.weight", (hidden, 2 * hidden)
    experts = shape.number("num_experts") or 0
    first_dense = shape.number("first_k_dense_replace") or 0
    intermediate = shape.number("intermediate_size") or 4 * hidden
    if experts > 1 and index >= first_dense:
        width = shape.number("moe_intermediate_size") or intermediate
        yield "mlp.gate.weight", (experts, hidden)
        yield "mlp.experts.gate_up_proj", (experts, 2 * width, hidden)
        yield "mlp.experts.down_proj", (experts, hidden, width)
        shared = shape.number("shared_expert_intermediate_size") or width * (
            shape.number("n_shared_experts") or 0
        )
        if shared:
            yield "mlp.shared_experts.gate_up_proj.weight", (2 * shared, hidden)
            yield "mlp.shared_experts.down_proj.weight", (hidden, shared)
    elif not kind.startswith("mamba"):
        yield "mlp.gate_up_proj.weight", ((2 if has_gate(shape) else 1) * intermediate, hidden)
        yield "mlp.down_proj.weight", (hidden, intermediate)


# A vision encoder's parameters come from encoder_layouts.toml in the same way.

_ENCODER_LAYOUTS_FILE: Final = Path(__file__).with_name("encoder_layouts.toml")
_SYMBOL: Final = re.compile(r"[A-Z]")
_COLORS: Final = 3
# Rows of Gemma 4's table of positions by default (configuration_gemma4.py, 5.23).
_POSITIONS_OF_GEMMA4: Final = 10240


def encoder_parameters_from_layout(shape: ModelShape) -> tuple[Parameter, ...] | None:
    """Return the parameters of a model's encoders of images and audio, and their projectors.

    Returns None if no layout covers its type, or the file lacks a number.
    """
    found: list[Parameter] = []
    covered = False
    for layout in _encoder_layouts_layouts().get(str(shape.outer.get("model_type")), ()):
        part = shape.outer.get(layout.get("part", "vision_config"))
        if layout.get("part") == "":
            part = shape.outer
        if not isinstance(part, Mapping):
            continue
        own = _parameters_of_encoder(shape, layout, part)
        if own is None:
            return None
        covered = True
        found += own
    return tuple(found) if covered else None


def _parameters_of_encoder(
    shape: ModelShape, layout: Mapping[str, Any], part: Mapping[str, Any]
) -> list[Parameter] | None:
    symbols = {"H": shape.hidden, **_encoder_layouts_symbols(shape.outer, part)}
    for symbol, key in layout.get("numbers", {}).items():
        if (number := _count(part, key)) is not None:
            symbols[symbol] = number
    where = layout.get("where", {})
    blocks = [layout["layer"]]
    for field, block in where.items():
        if part.get(field):
            blocks.append(block)
    layers = _count(part, layout.get("layers", "num_hidden_layers")) or _count(part, "depth")
    needed = _SYMBOL.findall(" ".join(_texts(blocks, layout["around"])))
    if layers is None or not set(needed) <= set(symbols):
        return None

    def rows(block: Mapping[str, str], prefix: str) -> Iterator[Parameter]:
        for name, text in block.items():
            size = tuple(dimension(part, symbols) for part in text.split(","))
            yield Parameter(prefix + name, size, prod(size) * shape.dtype_bytes)

    found: list[Parameter] = []
    for i in range(layers):
        for block in blocks:
            found += rows(block, f"{layout['prefix']}{i}.")
    for field, block in layout.get("each", {}).items():
        for i in range(len(part.get(field) or ())):
            found += rows({name.replace("#", str(i)): text for name, text in block.items()}, "")
    return [*found, *rows(layout["around"], "")]


def _encoder_layouts_symbols(outer: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, int]:
    """Return the layout symbols that the configuration has numbers for."""
    patch = _count(vision, "patch_size")
    side = _count(vision, "image_size")
    merge = _count(vision, "spatial_merge_size")
    width = _count(vision, "embed_dim") or _count(vision, "hidden_size")
    frames = _count(vision, "temporal_patch_size") or 1
    ratio_of_mlp = _count(vision, "mlp_ratio")
    ratio = outer.get("downsample_ratio")
    if isinstance(ratio, float) and 0 < ratio <= 1:
        share = ratio
    else:
        share = None
    found = {
        "W": width,
        "I": _count(vision, "intermediate_size")
        or (width and ratio_of_mlp and width * ratio_of_mlp),
        "T": patch and _COLORS * frames * patch**2,
        "E": _count(vision, "num_position_embeddings"),
        "B": _count(vision, "position_embedding_size") or _POSITIONS_OF_GEMMA4,
        "D": _count(vision, "head_dim"),
        "G": _merged_width(outer, width),
        "C": patch and _COLORS * patch**2,
        "L": patch and side and (side // patch) ** 2,
        "P": patch and side and (side // patch) ** 2 + 1,
        "M": width and merge and width * merge**2,
        "S": width and share and round(width / share**2),
    }
    rows: dict[str, int] = {}
    for symbol, number in found.items():
        if number:
            rows[symbol] = number
    return rows


def _merged_width(outer: Mapping[str, Any], width: int | None) -> int | None:
    """Return the width of the patches that Mistral 3's projector merges."""
    side = _count(outer, "spatial_merge_size")
    if side is None or width is None:
        return None
    return width * side**2


def _count(part: Mapping[str, Any], name: str) -> int | None:
    value = part.get(name)
    if is_count(value) and value > 0:
        return value
    return None


def _texts(blocks: Iterable[Mapping[str, str]], around: Mapping[str, str]) -> Iterator[str]:
    for block in (*blocks, around):
        yield from block.values()


def dimension(text: str, symbols: Mapping[str, int]) -> int:
    """Compute a dimension of a layout: a sum of products of symbols and counts."""
    total = 0
    for product in text.split("+"):
        size = 1
        for part in product.split("*"):
            word = part.strip()
            if word in symbols:
                size *= symbols[word]
            else:
                size *= int(word)
        total += size
    return total


@functools.cache
def _encoder_layouts_layouts() -> Mapping[str, list[Mapping[str, Any]]]:
    tables = read_tables("encoder_layouts", [_ENCODER_LAYOUTS_FILE])[_ENCODER_LAYOUTS_FILE]
    found: dict[str, list[Mapping[str, Any]]] = {}
    for layout in tables["encoders"]:
        for kind in layout["types"]:
            found.setdefault(kind, []).append(layout)
    return found


# A decoder's parameters come from layouts.toml, without building the model.

_FILE: Final = Path(__file__).with_name("layouts.toml")
# transformers builds single layers differently if one of these fields is set.
_BY_LAYER: Final = ("per_layer_config", "block_configs")


def parameters_from_layout(shape: ModelShape, *, tied: bool) -> tuple[Parameter, ...] | None:
    """Return every parameter of a decoder and its encoder.

    Returns None if no layout covers a type, or the file has a field that no layout covers.

    Args:
        shape: the model's numbers.
        tied: whether the head reuses the embedding.
    """
    kind = shape.model_type
    if kind == "gemma4_text" and shape.config.get("attention_k_eq_v"):
        kind = "gemma4_text with keys as values"
    layout = _layouts().get(kind)
    if shape.has_encoder:
        encoder = encoder_parameters_from_layout(shape)
    else:
        encoder = ()
    if layout is None or encoder is None or not _holds(layout, shape):
        return None
    symbols = _symbols(shape)
    blocks = _blocks()
    kinds = layout.get("kinds")
    parts = layer_parts(shape)

    def rows(names: list[str], prefix: str, own: Mapping[str, int]) -> Iterator[Parameter]:
        for name in names:
            for tensor, dimensions in blocks[name].items():
                size = tuple(_dimension(text, own, shape) for text in dimensions.split(","))
                yield Parameter(prefix + tensor, size, prod(size) * shape.dtype_bytes)

    chosen = _all_chosen(layout, "where", shape)
    dense = layout.get("dense", [])
    sparse = layout.get("sparse", dense)
    if "sparse_behind" in layout:
        behind = shape.number(layout["sparse_behind"]) or 0
    else:
        behind = 0
    names = ["embedding"] + ([] if tied else ["head"])
    heads = [layout.get(name, _HEADS[name]) for name in names]
    table = (shape.vocab, shape.hidden)
    found = [Parameter(name, table, prod(table) * shape.dtype_bytes) for name in heads]
    if kinds is not None and not set(parts) <= set(kinds):
        return None
    for index, part in enumerate(parts):
        if index >= behind:
            mlp = sparse
        else:
            mlp = dense
        own = [] if kinds is None else kinds[part]
        widths = symbols | _widths(shape, part)
        prefix = f"{layout.get('prefix', _PREFIX)}{index}."
        found += rows([*layout["layer"], *own, *chosen, *mlp], prefix, widths)
    around = _all_chosen(layout, "around_where", shape)
    found += (*rows([*layout["around"], *around], "", symbols), *encoder)
    # A dimension of 0 means that the file lacks a number.
    if any(parameter.elements == 0 for parameter in found):
        return None
    return tuple(found)


_PREFIX: Final = "model.layers."
_HEADS: Final = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}


def layer_parts(shape: ModelShape) -> tuple[str, ...]:
    """Return what decides each layer's parameters: its kind, or its letter or ratio."""
    pattern = shape.config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return tuple(pattern)
    ratios = shape.config.get("compress_ratios")
    if isinstance(ratios, list):
        return tuple(f"ratio {ratio}" for ratio in ratios[: shape.layers])
    types = shape.config.get("layers_block_type")
    if isinstance(types, list):
        return tuple(map(str, types))
    shared = shape.number("num_kv_shared_layers") or 0
    if not shared:
        return layer_kinds(shape)
    types = shape.config.get("layer_types")
    if not isinstance(types, list):
        return layer_kinds(shape)
    found = []
    for index, kind in enumerate(types):
        found.append(str(kind) if index < shape.layers - shared else f"{kind} shared")
    return tuple(found)


def _widths(shape: ModelShape, part: str) -> dict[str, int]:
    """Return the numbers of Gemma 4 that differ between layers.

    Layers of full attention have wider heads. Layers that share keys and values may have an MLP of
    twice the width.
    """
    found: dict[str, int] = {}
    if not shape.model_type.startswith(GEMMA4):
        return found
    if part.endswith("shared") and shape.config.get("use_double_wide_mlp"):
        found["I"] = 2 * (shape.number("intermediate_size") or 0)
    wide = shape.number("global_head_dim")
    if part.startswith("full") and wide:
        kv_heads = shape.kv_heads
        if shape.config.get("attention_k_eq_v"):
            kv_heads = shape.number("num_global_key_value_heads") or kv_heads
        found |= {"D": wide, "Q": shape.heads * wide, "K": kv_heads * wide}
    return found


def _dimension(text: str, symbols: Mapping[str, int], shape: ModelShape) -> int:
    """Compute a dimension whose symbols may also be keys of the configuration."""
    known = dict(symbols)
    for product in text.split("+"):
        for part in product.split("*"):
            word = part.strip()
            if word not in symbols and not word.isdecimal():
                known[word] = shape.number(word) or 0
    return dimension(text, known)


@functools.cache
def _tables() -> Mapping[str, Any]:
    return read_tables("layouts", [_FILE])[_FILE]


def _blocks() -> Mapping[str, Mapping[str, str]]:
    found: Mapping[str, Mapping[str, str]] = _tables()["blocks"]
    return found


@functools.cache
def _layouts() -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for layout in _tables()["layouts"]:
        for kind in layout["types"]:
            found[kind] = layout
    return found


def _holds(layout: Mapping[str, Any], shape: ModelShape) -> bool:
    """Return whether the file has every field that the layout needs and none that it excludes."""
    if any(shape.config.get(name) for name in _BY_LAYER):
        return False
    if not _has_plain_mlps(layout, shape):
        return False
    if any(shape.number(name) is None for name in layout.get("needs", ())):
        return False
    for name, value in layout.get("plain", {}).items():
        if shape.config.get(name) not in (None, value):
            return False
    return True


def _has_plain_mlps(layout: Mapping[str, Any], shape: ModelShape) -> bool:
    """Return whether the file lists no other MLPs than the layout: dense ones, then sparse ones."""
    types = shape.config.get("mlp_layer_types")
    if not types:
        return True
    if "sparse_behind" not in layout:
        return False
    dense = shape.number(layout["sparse_behind"]) or 0
    return bool(types == ["dense"] * dense + ["sparse"] * (shape.layers - dense))


def _all_chosen(layout: Mapping[str, Any], conditions: str, shape: ModelShape) -> list[str]:
    """Return the blocks of a layout's conditions, each as the file's field decides."""
    blocks = []
    for row in layout.get(conditions, ()):
        blocks += _chosen(row, shape)
    return blocks


def _chosen(row: Mapping[str, Any], shape: ModelShape) -> list[str]:
    value = shape.config.get(row["field"])
    if value is None:
        value = row.get("default")
    blocks: list[str] = row["blocks"] if value else row.get("otherwise", [])
    return blocks


def _symbols(shape: ModelShape) -> dict[str, int]:
    def number(name: str) -> int:
        return shape.number(name) or 0

    delta = shape.config.get("linear_attn_config")
    delta = delta if isinstance(delta, Mapping) else {}
    return {
        "k": _count(delta, "num_heads") or 0,
        "d": _count(delta, "head_dim") or 0,
        "c": _count(delta, "short_conv_kernel_size") or 0,
        "H": shape.hidden,
        "V": shape.vocab,
        "N": shape.heads,
        "D": shape.head_dim,
        "Q": shape.heads * shape.head_dim,
        "K": shape.kv_heads * shape.head_dim,
        "K/D": shape.kv_heads,
        "I": number("intermediate_size"),
        "E": number("num_experts"),
        "M": number("moe_intermediate_size"),
        "X": number("n_shared_experts") or number("num_shared_experts"),
        "S": number("shared_expert_intermediate_size"),
        "A": number("q_lora_rank"),
        "C": number("kv_lora_rank"),
        "R": number("qk_rope_head_dim"),
        "P": number("qk_nope_head_dim"),
        "W": number("v_head_dim"),
        "U": shape.heads * shape.head_dim // (number("o_groups") or 1),
        "Y": number("intermediate_size") or 4 * shape.hidden,
        "F": _adjusted_width(shape),
        "O": shape.layers * number("hidden_size_per_layer_input"),
        "Z": (number("mamba_num_heads") or number("mamba_n_heads"))
        * (number("mamba_head_dim") or number("mamba_d_head")),
    }


def _adjusted_width(shape: ModelShape) -> int:
    """Return the MLP width of LFM2: two thirds, rounded up, unless the file turns that off."""
    width = shape.number("block_ff_dim") or shape.number("intermediate_size") or 0
    if shape.config.get("block_auto_adjust_ff_dim", True) is False:
        return width
    factor = shape.config.get("block_ffn_dim_multiplier", 1.0)
    if not isinstance(factor, int | float) or not 0 < factor < 100:
        return 0
    multiple = shape.number("block_multiple_of") or 256
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple
