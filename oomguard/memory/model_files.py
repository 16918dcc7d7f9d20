"""Where a model's configuration and weights are: a folder, a ``config.json``, or a name on the hub."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

from oomguard.errors import ConfigError, InputError

# The largest header that safetensors itself accepts (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
_MAX_HEADER_BYTES: Final = 100_000_000
_MAX_CONFIG_BYTES: Final = 16_000_000
_ELEMENT_BITS: Final = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


_FLOATING: Final = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a model: its name, its shape in elements, the bytes it takes, and whether it is of plain floating point.

    An engine loads plain floating point in the data type it runs with, whatever the file has.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    floating: bool = True

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A parsed configuration, where it came from, and the weights beside it (None where there are none).

    ``processor`` is the configuration of what prepares images, empty where none is beside it.
    """

    name: str
    config_path: str
    config: Mapping[str, Any]
    parameters: tuple[Parameter, ...] | None
    processor: Mapping[str, Any] = field(default_factory=dict)


def find_model(model: str) -> ModelFiles:
    """Read a folder, a ``config.json``, or a hub name; raises InputError or ConfigError."""
    path = Path(model)
    if path.is_dir():
        config = read_json(path / "config.json")
        return ModelFiles(model, str(path / "config.json"), config, _headers(path), _processor(path))
    if path.is_file():
        return ModelFiles(model, model, read_json(path), None)
    if model.startswith((".", "/", "~")) or model.count("/") != 1 or model.endswith(".json"):
        raise InputError(
            f"{model}: no such folder or file", hint="a model folder, its config.json, or a hub name (ORG/NAME)"
        )
    return _from_hub(model)


def _processor(folder: Path) -> dict[str, Any]:
    path = folder / "preprocessor_config.json"
    return read_json(path) if path.is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file; raises ConfigError where it cannot be read or is none."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ConfigError("too large for a configuration", path=str(path))
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no such file", path=str(path), hint="a model folder holds a config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be read: {error}", path=str(path)) from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"holds a {type(parsed).__name__}, not an object", path=str(path))
    return parsed


def _headers(folder: Path) -> tuple[Parameter, ...] | None:
    """The tensors that the folder's safetensors files announce, None where there is no such file."""
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors.index.json").is_file():
        weight_map = read_json(folder / "model.safetensors.index.json").get("weight_map")
        names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        missing = sorted(str(name) for name in names if not (folder / str(name)).is_file())
        if missing:
            if len(missing) == len(names):
                return None
            raise ConfigError(
                f"the index names {missing[0]}, which is not there ({len(missing)} of {len(names)} are missing)",
                path=str(folder),
            )
        files = [folder / str(name) for name in sorted(names)] or files
    elif len(files) > 1:  # the same weights in the vendor's own format beside those of transformers
        files = [path for path in files if not path.name.startswith("consolidated")] or files
    if not files:
        return None
    return tuple(parameter for path in files for parameter in _header(path))


def _header(path: Path) -> Iterator[Parameter]:
    try:
        for name, entry in _read_header(path).items():
            if name != "__metadata__":
                shape = tuple(int(n) for n in entry["shape"])
                bits = _ELEMENT_BITS[entry["dtype"]]
                yield Parameter(name, shape, prod(shape) * bits // 8, entry["dtype"] in _FLOATING)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise ConfigError(f"not a safetensors file: {error}", path=str(path)) from None


def _read_header(path: Path) -> dict[str, Any]:
    """The JSON before the tensors, its length in the first eight bytes."""
    with path.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        if size > min(_MAX_HEADER_BYTES, os.fstat(stream.fileno()).st_size):
            raise ValueError("the header is longer than the file")
        found: dict[str, Any] = json.loads(stream.read(size))
    return found


def _from_hub(model: str) -> ModelFiles:
    """Configuration and headers of a hub model; nothing but these is fetched."""
    try:
        import huggingface_hub
    except ImportError:
        raise InputError(
            f"{model}: no such folder, and huggingface_hub is not installed", hint="pip install 'oomguard[hf]'"
        ) from None
    try:
        path = huggingface_hub.hf_hub_download(model, "config.json")
    except Exception as error:  # noqa: BLE001 - offline, gated, unknown or refused: the library has a dozen exceptions
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"{model}: no such folder, and the hub does not give its config.json ({reason})",
            hint="name a folder or a config.json",
        ) from None
    config = read_json(Path(path))
    try:
        found = huggingface_hub.get_safetensors_metadata(model)
    except Exception:  # noqa: BLE001 - weights in another format, or headers that cannot be had: the configuration is enough
        return ModelFiles(model, path, config, None)
    tensors = [
        Parameter(name, tuple(info.shape), info.data_offsets[1] - info.data_offsets[0], info.dtype in _FLOATING)
        for file in found.files_metadata.values()
        for name, info in file.tensors.items()
    ]
    return ModelFiles(model, path, config, tuple(tensors))
