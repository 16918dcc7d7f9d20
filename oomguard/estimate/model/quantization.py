"""Compute the bytes of quantized weights from the configuration alone."""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from oomguard.core.errors import ConfigError, SettingError
from oomguard.estimate.model.files import Parameter
from oomguard.estimate.model.shape import FAMILIES, MAX_COUNT, ModelShape, mistakes_in, printable

# Bits per element of a quantized matrix by method, with its share of scales and zero points.
# Sources: the formats' own documentation (AWQ, GPTQ, AQLM, compressed-tensors, bitsandbytes, OCP
# microscaling) and the parameters in vllm/model_executor/layers/quantization (0.33).

_SCALE_BYTES: Final = 2
_BITS: Final = frozenset({"bits", "num_bits"})
_MOST_BITS: Final = 64
# ModelOpt's formats with their scales: eight bits per 16 or 32 elements, half precision per 128. A
# scale for a whole tensor counts as zero.
ALGORITHM_BITS: Final[Mapping[str, float]] = {
    "FP8": 8.0,
    "FP8_PB_WO": 8 + 32 / 128**2,
    "NVFP4": 4 + 8 / 16,
    "W4A16_NVFP4": 4 + 8 / 16,
    "W4A16_AWQ": 4 + 16 / 128,
    "W4A8_AWQ": 4 + 16 / 128,
    "MXFP8": 8 + 8 / 32,
}


def config_groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the groups of a configuration whose weights have several formats."""
    groups = config.get("config_groups")
    if isinstance(groups, Mapping):
        found: list[Mapping[str, Any]] = []
        for g in groups.values():
            if isinstance(g, Mapping):
                found.append(g)
        return found
    return []


def _grouped(config: Mapping[str, Any]) -> float:
    """Return the bits of AWQ and GPTQ with a scale and a zero point per group of a column."""
    bits = _number(config, "bits", 4)
    group = _number(config, "group_size", 128)
    return bits + ((8 * _SCALE_BYTES + bits) / group if group > 0 else 0)


def _fp8(config: Mapping[str, Any]) -> float:
    block = config.get("weight_block_size")
    if (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(n, int) and n > 0 for n in block)
    ):
        return 8 + 32 / int(block[0] * block[1])
    return 8.0


def _bitsandbytes(config: Mapping[str, Any]) -> float:
    if config.get("load_in_8bit"):
        return 8.0
    return 4 + (8 / 64 + 32 / (64 * 256) if config.get("bnb_4bit_use_double_quant") else 32 / 64)


def _modelopt(config: Mapping[str, Any]) -> float:
    algorithm = str(config.get("quant_algo") or config.get("quantization", {})).upper()
    if "MIXED" in algorithm:
        return 0.0  # for a module that it does not name
    if "FP4" in algorithm:
        return 4 + 8 / 16
    return 8.0


def _aqlm(config: Mapping[str, Any]) -> float:
    """Return the bits of AQLM's codes per element; each code covers a group of elements.

    Source: vllm/model_executor/layers/quantization/aqlm.py, 0.10.
    """
    group = _number(config, "in_group_size", 8) * _number(config, "out_group_size", 1)
    code = 8 if _number(config, "nbits_per_codebook", 16) <= 8 else 16  # stored as int8 or int16
    if group > 0:
        return _number(config, "num_codebooks", 1) * code / group
    return 0.0


def codebook_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of AQLM's codebooks, which every matrix has regardless of its size."""
    group = _number(config, "in_group_size", 8) * _number(config, "out_group_size", 1)
    entries = 1 << max(0, min(_number(config, "nbits_per_codebook", 16), 16))
    return _number(config, "num_codebooks", 1) * entries * group * _SCALE_BYTES


def _compressed(config: Mapping[str, Any]) -> float:
    group = next(iter(config_groups(config)), {})
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise ConfigError("quantization_config.config_groups has no weights")
    return bits_of_group(weights)


def bits_of_group(weights: Mapping[str, Any]) -> float:
    """Return the bits of the weights of one group."""
    bits = _number(weights, "num_bits", 8)
    size = _number(weights, "group_size", 0)
    # Floating-point formats of four bits have scales of one byte.
    if weights.get("type") == "float" and bits == 4:
        scale = 1
    else:
        scale = _SCALE_BYTES
    if size > 0:
        extra = 8 * scale / size
    else:
        extra = 0.0
    if size > 0 and weights.get("symmetric") is False:
        extra += bits / size
    return bits + extra


def _number(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= MAX_COUNT:
        raise ConfigError(f"quantization_config.{name} must be a count, got {printable(value)}")
    if name in _BITS and not 0 < value <= _MOST_BITS:
        raise ConfigError(f"quantization_config.{name} must be from 1 to {_MOST_BITS}, got {value}")
    return value


# The bits per element by the method in the configuration.
METHODS: Final[Mapping[str, Callable[[Mapping[str, Any]], float]]] = {
    "aqlm": _aqlm,
    "auto-round": _grouped,
    "awq": _grouped,
    "awq_marlin": _grouped,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "compressed_tensors": _compressed,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _grouped,
    "gptq_marlin": _grouped,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "mxfp4": lambda _: 4 + 8 / 32,
}


# A quantized checkpoint lists modules by untrusted names, globs and patterns.

# Published files have a handful of patterns, and oomguard tries each on every module.
_MOST_PATTERNS: Final = 500
_MOST_PATTERN_CHARS: Final = 1000
# Processor time for all patterns of one model.
_SEARCH_LIMIT_S: Final = 2.0
_REGULAR: Final = "re:"
# Files and engines use different names for the decoder: backbone.layers.4,
# model.language_model.layers.4, model.layers.4.
_DECODER: Final = re.compile(
    r"^(?:(?:model|backbone|language_model|transformer)\.)+"
    r"(?=layers\.\d|visual\b|vision|audio|mtp\b|multi_modal|embed_)"
)


class ModuleNames:
    """Match modules against a configuration's list, ignoring the decoder's own prefix.

    Args:
        names: names of modules, globs, and patterns that begin with ``re:``.

    Raises:
        ConfigError: there are too many patterns, or one of them is too long.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        patterns: dict[str, None] = {}
        plain = set()
        for name in names:
            entry = _DECODER.sub("", name)
            if _is_pattern(entry):
                # A dict drops repeated patterns and keeps their order.
                patterns[entry] = None
            else:
                plain.add(entry)
        self._patterns = tuple(patterns)
        self._names = frozenset(plain)
        self._lengths = frozenset(name.count(".") + 1 for name in self._names)
        if len(self._patterns) > _MOST_PATTERNS:
            raise ConfigError(
                f"quantization_config has {len(self._patterns)} patterns, but oomguard "
                f"reads at most {_MOST_PATTERNS}"
            )
        for pattern in self._patterns:
            if len(pattern) > _MOST_PATTERN_CHARS:
                raise ConfigError(
                    f"quantization_config has the pattern {printable(pattern)} of "
                    f"{len(pattern)} characters"
                )
        self._spent_s = 0.0

    def has(self, module: str) -> bool:
        """Return whether the list covers a module or one of its parents.

        Raises:
            ConfigError: the patterns take too long.
        """
        own = _DECODER.sub("", module)
        parts = own.split(".")
        # A set lookup of every run of parts is much faster than a search for each listed name.
        for length in self._lengths:
            for i in range(len(parts) - length + 1):
                if ".".join(parts[i : i + length]) in self._names:
                    return True
        began = time.thread_time()
        try:
            return any(matches(module) or matches(own) for matches in self._compiled)
        except TimeoutError:
            raise _too_slow() from None
        finally:
            self._spent_s += time.thread_time() - began
            if self._spent_s > _SEARCH_LIMIT_S:
                raise _too_slow()

    @cached_property
    def _compiled(self) -> tuple[Callable[[str], Any], ...]:
        rows = []
        for found in map(_matcher, self._patterns):
            if found is not None:
                rows.append(found)
        return tuple(rows)


def _is_pattern(entry: str) -> bool:
    return entry.startswith(_REGULAR) or "*" in entry


def _too_slow() -> ConfigError:
    return ConfigError(
        f"quantization_config has patterns that need more than {_SEARCH_LIMIT_S:g} s for "
        "the model's modules"
    )


def _matcher(entry: str) -> Callable[[str], Any] | None:
    """Return a matcher for a pattern, or None for an invalid one, which engines ignore."""
    if not entry.startswith(_REGULAR):
        return re.compile(fnmatch.translate(entry)).match
    import regex

    from oomguard.rules.signature import too_much_repetition

    text = entry.removeprefix(_REGULAR)
    if too_much_repetition(text) is not None:
        return None
    try:
        compiled = regex.compile(text)
    except (regex.error, ValueError, RecursionError, OverflowError, MemoryError):
        return None
    return lambda module: compiled.match(module, timeout=_SEARCH_LIMIT_S)


_LINEAR: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d+\.")
_NEVER: Final = re.compile(
    r"norm|\.gate\.weight$|\.router\b|shared_expert_gate|conv1d|A_log|dt_bias|\.D$|embed|rotary"
)
_HEAD: Final = re.compile(r"(?:^|\.)lm_head\.weight$")
_REPACKED: Final = frozenset({"awq", "awq_marlin", "gptq", "gptq_marlin"})
_WHOLE_NUMBERS: Final = _REPACKED | {"auto-round"}


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """Describe a quantized format: bits per element with scales and zero points.

    ``experts_only`` quantizes only the experts. ``ignored`` lists modules that stay unquantized.
    ``groups`` are modules with their own bits, and ``bits`` then apply to the other modules.
    ``expert_bits`` are the experts' if the file sets them separately. ``head_bits`` are the head's.
    0 bits mean unquantized. ``table_bytes`` is the codebook that each matrix has regardless of its
    size.
    """

    bits: float
    experts_only: bool = False
    ignored: ModuleNames = field(default_factory=ModuleNames)
    groups: tuple[tuple[float, ModuleNames], ...] = ()
    expert_bits: float = 0.0
    head_bits: float = 0.0
    table_bytes: int = 0

    def bits_of(self, module: str) -> float:
        """Return the bits of a module's elements, or 0 if it is unquantized."""
        for bits, modules in self.groups:
            if modules.has(module):
                return bits
        return self.bits


def quantize_parameters(
    parameters: Iterable[Parameter], shape: ModelShape, asked: str | None, assumed: list[str]
) -> tuple[Parameter, ...]:
    """Return the parameters with their bytes after quantization.

    Args:
        parameters: the parameters in the engine's data type.
        shape: the model's numbers; its configuration may have a quantization of its own.
        asked: the method that the engine quantizes with while loading; None for none.
        assumed: receives a line for each assumption.

    Raises:
        ConfigError: the configuration's own quantization has a missing or absurd number.
        SettingError: the method is unknown or is not the checkpoint's own.
    """
    with mistakes_in(shape.path):
        form = _format(shape, asked, assumed)
        if form is None:
            return tuple(parameters)
        return tuple(_quantized(parameter, form) for parameter in parameters)


def _quantized(parameter: Parameter, form: QuantizedFormat) -> Parameter:
    name = parameter.name
    if _HEAD.search(name) and form.head_bits:
        return replace(parameter, bytes=round(parameter.elements * form.head_bits / 8))
    if len(parameter.shape) < 2 or not _LINEAR.search(name) or _NEVER.search(name):
        return parameter
    module = name.removesuffix(".weight")
    if (form.experts_only and not parameter.of_experts) or form.ignored.has(module):
        return parameter
    if parameter.of_experts and form.expert_bits:
        bits = form.expert_bits
    else:
        bits = form.bits_of(module)
    if bits:
        return replace(parameter, bytes=round(parameter.elements * bits / 8) + form.table_bytes)
    return parameter


def quantization_config(shape: ModelShape) -> Mapping[str, Any] | None:
    """Return the checkpoint's own quantization, or None if it is unquantized."""
    config = shape.config.get("quantization_config") or shape.outer.get("quantization_config")
    if isinstance(config, Mapping):
        return config
    return None


def unread_quantization(shape: ModelShape) -> tuple[str, ...]:
    """Return the names of the checkpoint's formats whose bits oomguard does not know.

    A mixed checkpoint without a format for each module is such a one: its files have the bits.
    """
    config = quantization_config(shape) or {}
    method = str(config.get("quant_method") or "")
    if method not in METHODS:
        return (f"quant_method {printable(method)}",) if method else ()
    if not method.startswith("modelopt"):
        return ()
    nested = config.get("quantization")
    own = nested if isinstance(nested, Mapping) else config
    algorithm = str(own.get("quant_algo") or "").upper()
    if "MIXED" not in algorithm:
        known = not algorithm or "FP4" in algorithm or algorithm in ALGORITHM_BITS
        return () if known else (f"quant_algo {printable(algorithm)}",)
    layers = own.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        return (f"quant_algo {printable(algorithm)} without quantized_layers",)
    named = set()
    for fields in layers.values():
        if fields:
            named.add(str(fields.get("quant_algo")).upper())
    return tuple(f"quant_algo {printable(name)}" for name in sorted(named - set(ALGORITHM_BITS)))


def is_repacked(shape: ModelShape) -> bool:
    """Return whether the checkpoint has integer weights, which the engine repacks for Marlin."""
    method = (quantization_config(shape) or {}).get("quant_method")
    return method in _REPACKED


def is_nvfp4(shape: ModelShape) -> bool:
    """Return whether the checkpoint's weights are in NVIDIA's four-bit format NVFP4."""
    config = quantization_config(shape) or {}
    return "nvfp4" in str(config.get("format") or config.get("quant_algo") or "").lower()


def quantizes_cache(shape: ModelShape) -> bool:
    """Return whether the checkpoint sets an eight-bit KV cache; vLLM's ``auto`` is then fp8.

    Sources: vllm/utils/torch_utils.py and model_executor/layers/attention/attention.py, 0.32.
    """
    config = quantization_config(shape) or {}
    scheme = config.get("kv_cache_scheme")
    named = str(config.get("kv_cache_quant_algo") or "")
    if isinstance(config.get("quantization"), Mapping):
        named = str(config["quantization"].get("kv_cache_quant_algo") or named)
    return named.upper() == "FP8" or (isinstance(scheme, Mapping) and scheme.get("num_bits") == 8)


def quantizes_mtp(shape: ModelShape) -> bool:
    """Return whether MTP layers are quantized like the decoder; most files leave them out."""
    config = quantization_config(shape)
    if config is None:
        return True
    if isinstance(layers := config.get("quantized_layers"), Mapping):
        return any("mtp" in str(module) for module in layers)
    ignored = ModuleNames(_ignored(config))
    modules = ("mtp", "mtp.layers.0.mlp", f"layers.{shape.layers}.mlp")
    return not any(map(ignored.has, modules))


def _ignored(config: Mapping[str, Any]) -> list[str]:
    """Return the configuration's list of unquantized modules."""
    fields = (config.get(key) for key in FAMILIES["names"]["not_quantized"])
    ignored: list[str] = []
    for names in fields:
        if isinstance(names, list):
            for name in names:
                if isinstance(name, str):
                    ignored.append(name)
    return ignored


def _check_method(config: Mapping[str, Any], asked: str | None) -> None:
    """Raise SettingError if the user's method is not the checkpoint's own.

    The engine refuses such a combination.
    """
    method = str(config.get("quant_method") or "").replace("_", "-")
    wanted = (asked or "").replace("_", "-").removesuffix("-marlin")
    if wanted and method and wanted not in {method, method.removesuffix("-marlin")}:
        raise SettingError(
            f"quantization is {asked!r}, but the checkpoint uses {method!r}",
            hint="omit the quantization setting",
        )


def size_loaded_parameters(
    parameters: Iterable[Parameter], shape: ModelShape, asked: str | None, assumed: list[str]
) -> tuple[Parameter, ...]:
    """Return a file's own tensors with their bytes after loading.

    Packed tensors keep their bytes; plain ones get the engine's data type. The arguments and errors
    are the same as for ``quantized``.
    """
    config = quantization_config(shape)
    if config is not None:
        _check_method(config, asked)
        return tuple(parameters)
    plain = []
    for p in parameters:
        if p.floating:
            plain.append(replace(p, bytes=p.elements * shape.dtype_bytes))
        else:
            plain.append(p)
    return quantize_parameters(plain, shape, asked, assumed)


def _format(shape: ModelShape, asked: str | None, assumed: list[str]) -> QuantizedFormat | None:
    config = quantization_config(shape)
    if config is not None:
        _check_method(config, asked)
        return _from_config(
            config,
            assumed,
            expert_bits=_EXPERT_BITS.get(str(shape.config.get("expert_dtype")), 0.0),
        )
    if asked is None:
        return None
    if asked not in _ASKED:
        raise SettingError(
            f"quantization {asked!r} needs a checkpoint in that format, but the model's "
            "configuration has no quantization_config",
            hint=_OF_FILES.get(asked, f"while loading: {', '.join(_ASKED)}"),
        )
    assumed.append(
        f"quantization {asked}: only the layers' matrices are quantized, not embeddings and head"
    )
    return QuantizedFormat(_ASKED[asked], experts_only=asked in _EXPERTS_ONLY)


# vLLM quantizes a half-precision checkpoint to these formats while loading.
_ASKED: Final = {"fp8": 8.0, "bitsandbytes": 4 + 32 / 64, "experts_int8": 8.0}
_EXPERTS_ONLY: Final = frozenset({"experts_int8", "mxfp4"})
# Only a file next to the configuration has the bits of these formats.
_OF_FILES: Final = {
    "gguf": "its bits are in the file: name FILE.gguf in the folder of the model's config.json"
}


# These experts have another format than the rest (DeepSeek-V4): four bits, and a scale of eight per
# 32 elements.
_EXPERT_BITS: Final[Mapping[str, float]] = {"fp4": 4 + 8 / 32}


def _from_config(
    config: Mapping[str, Any], assumed: list[str], expert_bits: float
) -> QuantizedFormat | None:
    method = str(config.get("quant_method") or "")
    if method in METHODS:
        bits = METHODS[method](config)
    else:
        bits = None
    if bits is None:
        assumed.append(
            f"unknown quantization method {printable(method)}: assumed unquantized weights, "
            "an upper bound"
        )
        return None
    ignored = _ignored(config)
    if not ignored and method in _WHOLE_NUMBERS:
        ignored = FAMILIES["names"]["encoder_modules"]
    groups = tuple(_groups(config)) + tuple(_named_layers(config))
    alone = not groups or any(_targets(group, modules=False) for group in config_groups(config))
    form = QuantizedFormat(
        bits if alone else 0.0, method in _EXPERTS_ONLY, ModuleNames(ignored), groups, expert_bits
    )
    if method == "aqlm":
        table = codebook_bytes(config)
    else:
        table = 0
    return replace(
        form, head_bits=_head_bits(config, form, names_some=bool(ignored)), table_bytes=table
    )


def _head_bits(config: Mapping[str, Any], form: QuantizedFormat, *, names_some: bool) -> float:
    """Return the bits of the head, or 0 if it is unquantized.

    ModelOpt's files list every unquantized module and quantize a head that the list omits. GPTQ and
    AutoRound have the field ``lm_head``. Sources: get_quant_method in
    vllm/model_executor/layers/quantization/modelopt.py, gptq_marlin.py.
    """
    if form.ignored.has("lm_head"):
        return 0.0
    if str(config.get("quant_method")).startswith("modelopt"):
        if names_some:
            return form.bits_of("lm_head")
        return 0.0
    if config.get("lm_head") is True:
        return form.bits
    return 0.0


def _named_layers(config: Mapping[str, Any]) -> Iterator[tuple[float, ModuleNames]]:
    """Yield the groups of a mixed ModelOpt checkpoint, which sets a format per module."""
    layers = config.get("quantized_layers")
    named: dict[str, list[str]] = {}
    for module, fields in layers.items() if isinstance(layers, Mapping) else ():
        if isinstance(module, str) and isinstance(fields, Mapping):
            named.setdefault(str(fields.get("quant_algo")).upper(), []).append(module)
    for algorithm, modules in named.items():
        if algorithm in ALGORITHM_BITS:
            yield ALGORITHM_BITS[algorithm], ModuleNames(modules)


def _groups(config: Mapping[str, Any]) -> Iterator[tuple[float, ModuleNames]]:
    """Yield the groups of a configuration that name modules, with the bits of their weights."""
    for group in config_groups(config):
        modules = _targets(group, modules=True)
        weights = group.get("weights")
        if modules and isinstance(weights, Mapping):
            yield bits_of_group(weights), ModuleNames(modules)


def _targets(group: Mapping[str, Any], *, modules: bool) -> list[str]:
    """Return a group's target modules, or the modules of its target classes such as ``Linear``."""
    named = group.get("targets")
    found = []
    if isinstance(named, list):
        for target in named:
            if isinstance(target, str) and _is_module(target) == modules:
                found.append(target)
    return found


def _is_module(target: str) -> bool:
    return "." in target or "*" in target or target.startswith("re:") or target == "lm_head"
