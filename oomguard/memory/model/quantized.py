"""Bytes of quantised weights by the configuration alone: element bits, scales and zero points by method.

Sources: the formats' own documentation (AWQ, GPTQ, compressed-tensors, bitsandbytes, OCP microscaling) and the parameters that
vllm/model_executor/layers/quantization creates for them (0.33).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from oomguard.errors import ConfigError, SettingError
from oomguard.memory.model.families import FAMILIES
from oomguard.memory.model.headers import Parameter
from oomguard.memory.model.json_file import mistakes_in, shown
from oomguard.memory.model.module_names import ModuleNames
from oomguard.memory.model.shape import MAX_COUNT, ModelShape

_LINEAR: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d+\.")
_NEVER: Final = re.compile(r"norm|\.gate\.weight$|\.router\b|shared_expert_gate|conv1d|A_log|dt_bias|\.D$|embed|rotary")
_SCALE_BYTES: Final = 2
_BITS: Final = frozenset({"bits", "num_bits"})
_REPACKED: Final = frozenset({"awq", "awq_marlin", "gptq", "gptq_marlin"})
_WHOLE_NUMBERS: Final = _REPACKED | {"auto-round"}
_MOST_BITS: Final = 64


@dataclass(frozen=True, slots=True)
class Format:
    """Bits of one element with its share of scales and zero points.

    ``experts_only`` leaves all but the experts as they are, ``ignored`` the modules of those names. ``groups`` are modules
    with bits of their own, ``expert_bits`` those of the experts where the file says them apart. Where there are groups,
    ``bits`` are those of the others, 0 where they stay as they are.
    """

    bits: float
    experts_only: bool = False
    ignored: ModuleNames = field(default_factory=ModuleNames)
    groups: tuple[tuple[float, ModuleNames], ...] = ()
    expert_bits: float = 0.0

    def bits_of(self, module: str) -> float:
        """Return the bits of a module's elements, 0 where they stay as they are."""
        return next((bits for bits, modules in self.groups if modules.has(module)), self.bits)


def quantized(
    parameters: Iterable[Parameter], shape: ModelShape, asked: str | None, assumed: list[str]
) -> tuple[Parameter, ...]:
    """Return the parameters with the bytes they take once quantised.

    Args:
        parameters: the parameters in the engine's data type.
        shape: the model's numbers; its configuration may say how the checkpoint is quantised.
        asked: the method that the engine is asked to quantise with while it loads.
        assumed: receives a line for each assumption.

    Raises:
        ConfigError: the configuration's own quantization has a number that is missing or absurd.
        SettingError: the method asked for is not known, or not the checkpoint's own.
    """
    with mistakes_in(shape.path):
        form = _format(shape, asked, assumed)
        if form is None:
            return tuple(parameters)
        return tuple(_quantized(parameter, form) for parameter in parameters)


def _quantized(parameter: Parameter, form: Format) -> Parameter:
    name = parameter.name
    if len(parameter.shape) < 2 or not _LINEAR.search(name) or _NEVER.search(name):
        return parameter
    module = name.removesuffix(".weight")
    if (form.experts_only and not parameter.of_experts) or form.ignored.has(module):
        return parameter
    bits = form.expert_bits if parameter.of_experts and form.expert_bits else form.bits_of(module)
    return replace(parameter, bytes=round(parameter.elements * bits / 8)) if bits else parameter


def quantization_config(shape: ModelShape) -> Mapping[str, Any] | None:
    """Return what the checkpoint says of its own quantization, None where it is not quantised."""
    config = shape.config.get("quantization_config") or shape.outer.get("quantization_config")
    return config if isinstance(config, Mapping) else None


def is_repacked(shape: ModelShape) -> bool:
    """Whether the checkpoint's weights are of whole numbers, which the engine packs again for Marlin's kernels."""
    method = (quantization_config(shape) or {}).get("quant_method")
    return method in _REPACKED


def is_nvfp4(shape: ModelShape) -> bool:
    """Whether the checkpoint's weights are NVIDIA's numbers of four bits."""
    config = quantization_config(shape) or {}
    return "nvfp4" in str(config.get("format") or config.get("quant_algo") or "").lower()


def quantizes_cache(shape: ModelShape) -> bool:
    """Whether the checkpoint asks for keys and values in eight bits: vLLM's ``auto`` then means fp8.

    Sources: vllm/utils/torch_utils.py and model_executor/layers/attention/attention.py, 0.32.
    """
    config = quantization_config(shape) or {}
    scheme = config.get("kv_cache_scheme")
    named = str(config.get("kv_cache_quant_algo") or "")
    if isinstance(config.get("quantization"), Mapping):
        named = str(config["quantization"].get("kv_cache_quant_algo") or named)
    return named.upper() == "FP8" or (isinstance(scheme, Mapping) and scheme.get("num_bits") == 8)


def _check_method(config: Mapping[str, Any], asked: str | None) -> None:
    """Raise SettingError where another method is asked for than the checkpoint's own, which the engine refuses."""
    method = str(config.get("quant_method") or "").replace("_", "-")
    wanted = (asked or "").replace("_", "-").removesuffix("-marlin")
    if wanted and method and wanted not in {method, method.removesuffix("-marlin")}:
        raise SettingError(
            f"quantization is {asked!r}, the checkpoint is quantised with {method!r}", hint="leave it out"
        )


def loaded(
    parameters: Iterable[Parameter], shape: ModelShape, asked: str | None, assumed: list[str]
) -> tuple[Parameter, ...]:
    """Return a file's own tensors with the bytes they take once loaded: packed ones as they are, plain ones in the engine's type.

    The arguments and errors are those of ``quantized``.
    """
    config = quantization_config(shape)
    if config is not None:
        _check_method(config, asked)
        return tuple(parameters)
    plain = (replace(p, bytes=p.elements * shape.dtype_bytes) if p.floating else p for p in parameters)
    return quantized(plain, shape, asked, assumed)


def _format(shape: ModelShape, asked: str | None, assumed: list[str]) -> Format | None:
    config = quantization_config(shape)
    if config is not None:
        _check_method(config, asked)
        return _from_config(config, assumed, expert_bits=_EXPERT_BITS.get(str(shape.config.get("expert_dtype")), 0.0))
    if asked is None:
        return None
    if asked not in _ASKED:
        raise SettingError(
            f"quantization {asked!r} needs a checkpoint that is quantised so; the model's configuration has no quantization_config",
            hint=f"while loading: {', '.join(_ASKED)}",
        )
    assumed.append(f"quantization {asked}: the matrices of the layers, embeddings and head stay as they are")
    return Format(_ASKED[asked], experts_only=asked in _EXPERTS_ONLY)


# Formats that vLLM makes of a half-precision checkpoint while it loads.
_ASKED: Final = {"fp8": 8.0, "bitsandbytes": 4 + 32 / 64, "experts_int8": 8.0}
_EXPERTS_ONLY: Final = frozenset({"experts_int8", "mxfp4"})


# Experts of another format than the rest (DeepSeek-V4): four bits, and a scale of eight for each 32.
_EXPERT_BITS: Final[Mapping[str, float]] = {"fp4": 4 + 8 / 32}


def _from_config(config: Mapping[str, Any], assumed: list[str], expert_bits: float) -> Format | None:
    method = str(config.get("quant_method") or "")
    bits = _METHODS[method](config) if method in _METHODS else None
    if bits is None:
        assumed.append(f"quantization method {shown(method)} is not known: weights as if not quantised, an upper bound")
        return None
    fields = (config.get(key) for key in FAMILIES["names"]["not_quantized"])
    ignored = [name for names in fields if isinstance(names, list) for name in names if isinstance(name, str)]
    if not ignored and method in _WHOLE_NUMBERS:
        ignored = FAMILIES["names"]["encoder_modules"]
    groups = tuple(_groups(config))
    alone = not groups or any(_targets(group, modules=False) for group in _config_groups(config))
    return Format(bits if alone else 0.0, method in _EXPERTS_ONLY, ModuleNames(ignored), groups, expert_bits)


def _config_groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = config.get("config_groups")
    return [g for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, Mapping) else []


def _groups(config: Mapping[str, Any]) -> Iterator[tuple[float, ModuleNames]]:
    """Yield the groups of a configuration that name modules, with the bits of their weights."""
    for group in _config_groups(config):
        modules, weights = _targets(group, modules=True), group.get("weights")
        if modules and isinstance(weights, Mapping):
            yield _bits_of_group(weights), ModuleNames(modules)


def _targets(group: Mapping[str, Any], *, modules: bool) -> list[str]:
    """Return the targets of a group that are modules, or those that are classes of them, as ``Linear``."""
    named = group.get("targets")
    found = [target for target in named if isinstance(target, str)] if isinstance(named, list) else []
    return [target for target in found if ("." in target or "*" in target or target.startswith("re:")) == modules]


def _grouped(config: Mapping[str, Any]) -> float:
    """Return the bits of AWQ and GPTQ, which have a scale and a zero point for each group of a column."""
    bits, group = _number(config, "bits", 4), _number(config, "group_size", 128)
    return bits + ((8 * _SCALE_BYTES + bits) / group if group > 0 else 0)


def _fp8(config: Mapping[str, Any]) -> float:
    block = config.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
        return 8 + 32 / int(block[0] * block[1])
    return 8.0


def _bitsandbytes(config: Mapping[str, Any]) -> float:
    if config.get("load_in_8bit"):
        return 8.0
    return 4 + (8 / 64 + 32 / (64 * 256) if config.get("bnb_4bit_use_double_quant") else 32 / 64)


def _modelopt(config: Mapping[str, Any]) -> float:
    fp4 = "FP4" in str(config.get("quant_algo") or config.get("quantization", {})).upper()
    return 4 + 8 / 16 if fp4 else 8.0


def _compressed(config: Mapping[str, Any]) -> float:
    group = next(iter(_config_groups(config)), {})
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise ConfigError("quantization_config.config_groups has no weights")
    return _bits_of_group(weights)


def _bits_of_group(weights: Mapping[str, Any]) -> float:
    bits, size = _number(weights, "num_bits", 8), _number(weights, "group_size", 0)
    # Formats of four bits and floating point have scales of one byte.
    scale = 1 if weights.get("type") == "float" and bits == 4 else _SCALE_BYTES
    extra = 8 * scale / size if size > 0 else 0.0
    if size > 0 and weights.get("symmetric") is False:
        extra += bits / size
    return bits + extra


def _number(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= MAX_COUNT:
        raise ConfigError(f"quantization_config.{name} is {shown(value)}, not a count")
    if name in _BITS and not 0 < value <= _MOST_BITS:
        raise ConfigError(f"quantization_config.{name} is {value}, not from 1 to {_MOST_BITS}")
    return value


_METHODS: Final[Mapping[str, Callable[[Mapping[str, Any]], float]]] = {
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
    "mxfp4": lambda _: 4 + 8 / 32,
}
