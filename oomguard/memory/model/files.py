"""Where a model's configuration and weights are: a folder, a ``config.json``, or a name on the hub."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

from oomguard.errors import ConfigError, InputError
from oomguard.memory.model.families import FAMILIES

# The largest header that safetensors itself accepts (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
_MAX_HEADER_BYTES: Final = 100_000_000
_MAX_CONFIG_BYTES: Final = 16_000_000
_ELEMENT_BITS: Final[dict[str, int]] = FAMILIES["element_bits"]
_FLOATING: Final = frozenset({"F64", "F32", "F16", "BF16"})
_EXPERTS: Final = re.compile(r"\.experts?\b")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a model: its name, its shape in elements, and the bytes it takes.

    ``floating`` says that it is plain floating point, which an engine loads in the data type it runs with.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    floating: bool = True

    @property
    def elements(self) -> int:
        """Count the numbers that it holds."""
        return prod(self.shape)

    @property
    def of_experts(self) -> bool:
        """Whether it belongs to the experts of a mixture, by its name."""
        return _EXPERTS.search(self.name) is not None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A parsed configuration, where it came from, and what lies beside it.

    ``parameters`` are the weights' tensors, None without a safetensors file; ``processor`` is the configuration of the image
    processor, empty without one.
    """

    name: str
    config_path: str
    config: Mapping[str, Any]
    parameters: tuple[Parameter, ...] | None
    processor: Mapping[str, Any] = field(default_factory=dict)


def find_model(model: str) -> ModelFiles:
    """Read what a model's folder, its ``config.json`` or the hub has of it; weights are not fetched.

    Args:
        model: a folder, a ``config.json``, or a name on the hub (``ORG/NAME``).

    Raises:
        InputError: nothing of that name is found.
        ConfigError: a file of it cannot be read.
    """
    path = Path(model)
    if path.is_dir():
        config = read_json(path / "config.json")
        return ModelFiles(model, str(path / "config.json"), config, _headers(path), _processor(path))
    if path.is_file():
        return ModelFiles(model, model, read_json(path), None)
    if model.startswith((".", "/", "~")) or model.count("/") != 1 or model.endswith(".json"):
        raise InputError(
            f"{model}: no such folder or file",
            hint="name a model folder, its config.json, or a model on the hub (ORG/NAME)",
        )
    return _from_hub(model)


def _processor(folder: Path) -> dict[str, Any]:
    path = folder / "preprocessor_config.json"
    return read_json(path) if path.is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raises ConfigError where the file holds none."""
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
    """Read the tensors that a folder's safetensors files announce; None where there is no such file."""
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
    elif len(files) > 1:  # some folders hold the same weights once more, in the vendor's own format
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
    """Read the JSON before the tensors, whose length is in the first eight bytes."""
    with path.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        if size > min(_MAX_HEADER_BYTES, os.fstat(stream.fileno()).st_size):
            raise ValueError("the header is longer than the file")
        found: dict[str, Any] = json.loads(stream.read(size))
    return found


def _from_hub(model: str) -> ModelFiles:
    """Fetch the configuration and the headers of a model on the hub, and nothing else."""
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
