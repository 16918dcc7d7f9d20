"""Find a model's configuration and the tensors of its weights in a folder or on the hub.

oomguard reads a ``config.json`` and the headers of safetensors files, never the weights themselves.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import stat
import struct
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path, PurePath
from typing import Any, Final
from urllib.parse import urlsplit

from oomguard.core.errors import ConfigError, InputError
from oomguard.core.files import open_regular
from oomguard.core.installation import install_hint
from oomguard.estimate.model.shape import FAMILIES, parse_object, printable, read_json

# safetensors itself accepts headers up to this size (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
# Here the limit covers all files together.
MAX_HEADERS_BYTES: Final = 100_000_000
# No tensor is larger. A larger shape is a mistake that arithmetic would hide.
_MAX_ELEMENTS: Final = 1 << 50
_MAX_DIMENSIONS: Final = 64
_MAX_NAME_CHARS: Final = 500
_LENGTH: Final = struct.Struct("<Q")
_INDEX: Final = "model.safetensors.index.json"
_ELEMENT_BITS: Final[dict[str, int]] = FAMILIES["element_bits"]
_FLOATING: Final = frozenset({"F64", "F32", "F16", "BF16"})
_EXPERTS: Final = re.compile(r"\.experts?\b")


@dataclass(frozen=True, slots=True)
class Parameter:
    """Describe one tensor of a model: its name, its shape in elements, and its bytes.

    ``floating`` is true for plain floating point, which an engine loads in its own data type.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    floating: bool = True

    @property
    def elements(self) -> int:
        """Count the elements of the tensor."""
        return prod(self.shape)

    @property
    def of_experts(self) -> bool:
        """Return whether the tensor's name belongs to the experts of a mixture."""
        return _EXPERTS.search(self.name) is not None


def read_headers(folder: Path) -> tuple[Parameter, ...] | None:
    """Read the tensors of a folder's safetensors files.

    Returns None without such a file.

    Raises:
        ConfigError: a file or the index has unexpected content, or some files are missing.
        InputError: a file is irregular or unreadable.
    """
    files = sorted(folder.glob("*.safetensors"))
    if is_there(folder / _INDEX):
        names = _indexed(folder / _INDEX)
        missing = sorted(itertools.filterfalse(lambda name: is_there(folder / name), names))
        if missing:
            if len(missing) == len(names):
                return None
            raise ConfigError(
                f"the index names {missing[0]}, but the folder lacks it ({len(missing)} "
                f"of {len(names)} files are missing)",
                path=str(folder),
            )
        files = [folder / name for name in sorted(names)] or files
    elif len(files) > 1:  # some folders have the same weights again in the vendor's own format
        files = list(itertools.filterfalse(_is_vendors, files)) or files
    if not files:
        return None
    found: list[Parameter] = []
    left_bytes = MAX_HEADERS_BYTES
    for path in files:
        header = _read_header(path, left_bytes)
        left_bytes -= len(header)
        found += _tensors(header, path)
    return tuple(found)


def _is_vendors(path: Path) -> bool:
    return path.name.startswith("consolidated")


def is_there(path: Path) -> bool:
    """Return whether any entry has this name; False for an impossible name."""
    try:
        return path.exists()
    except (OSError, ValueError):  # an impossible name, or another user's
        return False


def _indexed(path: Path) -> set[str]:
    """Return the files of this folder that an index names.

    The index is untrusted, so it may not name a file elsewhere.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        return set()
    for name in weight_map.values():
        if not isinstance(name, str) or PurePath(name).name != name:
            raise ConfigError(
                f"weight_map names {printable(name)}, which is not a file of this folder",
                path=str(path),
            )
    return set(weight_map.values())


def _tensors(header: bytes, path: Path) -> Iterator[Parameter]:
    try:
        for name, entry in parse_object(header, path).items():
            if name != "__metadata__":
                yield read_tensor(name, entry, path)
    except ConfigError as error:
        raise _damaged(str(error).removeprefix(f"{path}: "), path) from None


def read_tensor(name: str, entry: object, path: str | Path) -> Parameter:
    """Parse one entry of a header; raises ConfigError with ``path`` if it is not a tensor."""
    dtype, shape = (
        (entry.get("dtype"), entry.get("shape")) if isinstance(entry, Mapping) else (None, None)
    )
    if isinstance(dtype, str):
        bits = _ELEMENT_BITS.get(dtype)
    else:
        bits = None
    if len(name) > _MAX_NAME_CHARS:
        raise ConfigError(
            f"{printable(name)} is a tensor name of {len(name)} characters", path=str(path)
        )
    if bits is None:
        raise ConfigError(
            f"{printable(name)} has the unknown dtype {printable(dtype)}", path=str(path)
        )
    if isinstance(shape, list):
        sizes = tuple(shape)
    else:
        sizes = (-1,)
    counts = all(type(size) is int and 0 <= size <= _MAX_ELEMENTS for size in sizes)
    if not counts or len(sizes) > _MAX_DIMENSIONS or prod(sizes) > _MAX_ELEMENTS:
        raise ConfigError(
            f"{printable(name)} must have a list of sizes as its shape, got {printable(shape)}",
            path=str(path),
        )
    return Parameter(name, sizes, prod(sizes) * bits // 8, dtype in _FLOATING)


def _read_header(path: Path, most_bytes: int) -> bytes:
    """Read the JSON before the tensors; its length is in the first eight bytes."""
    try:
        with open_regular(path) as stream:
            start = stream.read(_LENGTH.size)
            if len(start) < _LENGTH.size:
                raise _damaged("the file is shorter than the length of a header", path)
            size = _LENGTH.unpack(start)[0]
            if size > os.fstat(stream.fileno()).st_size:
                raise _damaged("the header is longer than the file", path)
            if size > most_bytes:
                raise _damaged(f"the headers are larger than {MAX_HEADERS_BYTES} bytes", path)
            return stream.read(size)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", hint="expected a safetensors file") from None


def _damaged(reason: str, path: Path) -> ConfigError:
    return ConfigError(f"not a safetensors file: {reason}", path=str(path))


# An engine stores a GGUF file's tensors packed on the device. Source: GGUFLinearMethod and
# GGUFEmbeddingMethod in vllm/model_executor/layers/quantization/gguf.py, 0.8.2. vLLM printed 3.26
# GiB for a Llama-3.2-3B whose Q8_0 file has 3.18 GiB. The difference includes the table of
# positions.

SUFFIX: Final = ".gguf"
_PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def gguf_bytes(path: Path) -> int | None:
    """Return the bytes of a GGUF file, or of a folder's only one with all its parts.

    Returns None if there is no file, or several.
    """
    if path.is_dir():
        files = sorted(path.glob(f"*{SUFFIX}"))
    elif path.suffix == SUFFIX:
        files = [path]
    else:
        files = []
    models = {_PART.sub("", file.name) for file in files}
    if len(models) == 1:
        return sum(file.stat().st_size for file in files)
    return None


def scale_to_file(parameters: Sequence[Parameter], file_bytes: int) -> tuple[Parameter, ...]:
    """Scale parameters so that they take the file's bytes in total, each by its share of elements.

    Formats differ between tensors, but their distribution matters only to ranks and stages.
    """
    elements = sum(parameter.elements for parameter in parameters)
    return tuple(replace(p, bytes=round(p.elements * file_bytes / elements)) for p in parameters)


_HINT: Final = "name a model folder, its config.json, or a model on the hub (ORG/NAME)"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Hold a parsed configuration, its source, and the files next to it.

    ``parameters`` are the tensors of the weights, or None without a safetensors file. ``processor``
    is the configuration of the image processor, empty without one. ``gguf_bytes`` is the size of a
    GGUF file, or None without one.
    """

    name: str
    config_path: str
    config: Mapping[str, Any]
    parameters: tuple[Parameter, ...] | None
    processor: Mapping[str, Any] = field(default_factory=dict)
    gguf_bytes: int | None = None


def find_model(model: str) -> ModelFiles:
    """Read a model's configuration and headers without fetching its weights.

    Args:
        model: a folder, a ``config.json``, a GGUF file next to one, or a hub name (``ORG/NAME``).

    Raises:
        InputError: nothing has that name, or one of its files is irregular or unreadable.
        ConfigError: one of its files has unexpected content.
    """
    path = Path(model)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _from_hub(_hub_name(model))
    except (OSError, ValueError) as error:  # an impossible name, or another user's
        raise InputError(
            f"{printable(model)}: {getattr(error, 'strerror', None) or error}", hint=_HINT
        ) from None
    if path.suffix == SUFFIX and stat.S_ISREG(mode):
        return _of_gguf(model, path)
    if not stat.S_ISDIR(mode):
        return ModelFiles(model, model, read_json(path), None)
    config = read_json(path / "config.json")
    return ModelFiles(
        model,
        str(path / "config.json"),
        config,
        read_headers(path),
        _processor(path),
        gguf_bytes(path),
    )


def _of_gguf(model: str, path: Path) -> ModelFiles:
    config = path.with_name("config.json")
    if not is_there(config):
        raise InputError(
            f"{model}: there is no config.json next to it",
            hint="copy the config.json of the original model into that folder",
        )
    return ModelFiles(
        model, str(config), read_json(config), None, _processor(path.parent), gguf_bytes(path)
    )


def _hub_name(model: str) -> str:
    if model.startswith((".", "/", "~")) or model.count("/") != 1 or model.endswith(".json"):
        raise InputError(f"{model}: no such folder or file", hint=_HINT)
    return model


def _processor(folder: Path) -> dict[str, Any]:
    path = folder / "preprocessor_config.json"
    if is_there(path):
        return read_json(path)
    return {}


def _from_hub(model: str) -> ModelFiles:
    """Fetch only the configuration and the weight headers of a model on the hub."""
    try:
        import huggingface_hub
        from huggingface_hub.constants import ENDPOINT
    except ImportError:
        raise InputError(
            f"{model}: no such folder, and huggingface_hub is not installed",
            hint=install_hint("hf"),
        ) from None
    offline = _is_offline(ENDPOINT)
    try:
        path = huggingface_hub.hf_hub_download(model, "config.json", local_files_only=offline)
    except Exception as error:  # noqa: BLE001
        # The library has a dozen exceptions for offline, gated, unknown and refused.
        raise _not_on_hub(model, error, offline=offline) from None
    if offline:
        return replace(find_model(str(Path(path).parent)), name=model)
    config = read_json(Path(path))
    try:
        found = huggingface_hub.get_safetensors_metadata(model)
    except Exception:  # noqa: BLE001
        # The headers are missing or in another format; the configuration is enough.
        return ModelFiles(model, path, config, None)
    tensors = []
    for file in found.files_metadata.values():
        for name, info in file.tensors.items():
            entry = {"dtype": info.dtype, "shape": list(info.shape)}
            tensors.append(read_tensor(name, entry, path))
    return ModelFiles(model, path, config, tuple(tensors))


def _is_offline(endpoint: str) -> bool:
    """Return whether the hub's name has no address; the library would retry for half a minute."""
    if urllib.request.getproxies():
        return False
    try:
        socket.getaddrinfo(urlsplit(endpoint).hostname, 443)
    except OSError:
        return True
    return False


def _not_on_hub(model: str, error: Exception, *, offline: bool) -> InputError:
    from huggingface_hub.constants import HF_HUB_CACHE

    if offline:
        folder = Path(HF_HUB_CACHE) / "--".join(("models", *model.split("/")))
        return InputError(
            f"{model}: no such folder, the hub cannot be reached, and its config.json is not in "
            f"the cache {folder}",
            hint="name a folder or a config.json, or fetch the model where there is a network",
        )
    if str(error).strip():
        reason = str(error).strip().splitlines()[0]
    else:
        reason = type(error).__name__
    return InputError(
        f"{model}: no such folder, and the hub did not return its config.json ({reason})",
        hint="name a folder or a config.json",
    )
