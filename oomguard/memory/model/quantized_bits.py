"""Bits of one element of a quantised matrix by method, with its share of scales and zero points, from the configuration alone.

Sources: the formats' own documentation (AWQ, GPTQ, AQLM, compressed-tensors, bitsandbytes, OCP microscaling) and the parameters that
vllm/model_executor/layers/quantization creates for them (0.33).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from oomguard.errors import ConfigError
from oomguard.memory.model.json_file import shown
from oomguard.memory.model.shape import MAX_COUNT

_SCALE_BYTES: Final = 2
_BITS: Final = frozenset({"bits", "num_bits"})
_MOST_BITS: Final = 64
# ModelOpt's formats, each with its scales: one of eight bits for 16 or 32 elements, of half precision for 128, none a tensor's.
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
    """Return the groups of a configuration that has weights of several formats."""
    groups = config.get("config_groups")
    return [g for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, Mapping) else []


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
    algorithm = str(config.get("quant_algo") or config.get("quantization", {})).upper()
    if "MIXED" in algorithm:
        return 0.0  # of a module that it does not name
    return 4 + 8 / 16 if "FP4" in algorithm else 8.0


def _aqlm(config: Mapping[str, Any]) -> float:
    """Return AQLM's codes of one element; each stands for a group of them (vllm/model_executor/layers/quantization/aqlm.py, 0.10)."""
    group = _number(config, "in_group_size", 8) * _number(config, "out_group_size", 1)
    code = 8 if _number(config, "nbits_per_codebook", 16) <= 8 else 16  # kept as int8 or int16
    return _number(config, "num_codebooks", 1) * code / group if group > 0 else 0.0


def codebook_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of the codebooks that each matrix of AQLM has, whatever its size."""
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


# The bits of one element by the method that a configuration names.
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
