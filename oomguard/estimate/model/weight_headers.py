"""The tensors that a folder's safetensors files announce in their headers: names, shapes, bytes.
Weights are never read.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path, PurePath
from typing import Final

from oomguard.core.errors import ConfigError, InputError
from oomguard.core.files import open_regular
from oomguard.estimate.model.shape import FAMILIES, parse_object, read_json, shown

# The largest header that safetensors itself accepts (safetensors/src/tensor.rs, MAX_HEADER_SIZE);
# here of all files together.
MAX_HEADERS_BYTES: Final = 100_000_000
# Beyond any tensor: above it a shape is a mistake, which arithmetic would only hide.
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
    """One tensor of a model: its name, its shape in elements, and the bytes it takes.

    ``floating`` says that it is plain floating point, which an engine loads in the data type it
    runs with.
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


def read_headers(folder: Path) -> tuple[Parameter, ...] | None:
    """Read the tensors of a folder's safetensors files; None where there is no such file.

    Raises:
        ConfigError: a file or the index holds something else, or some of the files are missing.
        InputError: one of them is not a regular file, or cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if is_there(folder / _INDEX):
        names = _indexed(folder / _INDEX)
        missing = sorted(name for name in names if not is_there(folder / name))
        if missing:
            if len(missing) == len(names):
                return None
            raise ConfigError(
                f"the index names {missing[0]}, which is not there ({len(missing)} of "
                f"{len(names)} are missing)",
                path=str(folder),
            )
        files = [folder / name for name in sorted(names)] or files
    elif len(files) > 1:  # some folders hold the same weights once more, in the vendor's own format
        files = [path for path in files if not path.name.startswith("consolidated")] or files
    if not files:
        return None
    found: list[Parameter] = []
    left_bytes = MAX_HEADERS_BYTES
    for path in files:
        header = _read_header(path, left_bytes)
        left_bytes -= len(header)
        found += _tensors(header, path)
    return tuple(found)


def is_there(path: Path) -> bool:
    """Whether there is anything of this name, of whatever kind; no for a name that cannot be."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, a folder of someone else
        return False


def _indexed(path: Path) -> set[str]:
    """Return the files that an index names: of its own folder, since a stranger may
    name any other.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        return set()
    for name in weight_map.values():
        if not isinstance(name, str) or PurePath(name).name != name:
            raise ConfigError(
                f"weight_map names {shown(name)}, not a file of this folder", path=str(path)
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
    """Read one entry of a header; raises ConfigError, naming ``path``, for one that is
    no tensor's.
    """
    dtype, shape = (
        (entry.get("dtype"), entry.get("shape")) if isinstance(entry, Mapping) else (None, None)
    )
    if isinstance(dtype, str):
        bits = _ELEMENT_BITS.get(dtype)
    else:
        bits = None
    if len(name) > _MAX_NAME_CHARS:
        raise ConfigError(
            f"{shown(name)} is the name of a tensor, of {len(name)} characters", path=str(path)
        )
    if bits is None:
        raise ConfigError(
            f"{shown(name)} has the dtype {shown(dtype)}, which is not known", path=str(path)
        )
    if isinstance(shape, list):
        sizes = tuple(shape)
    else:
        sizes = (-1,)
    counts = all(type(size) is int and 0 <= size <= _MAX_ELEMENTS for size in sizes)
    if not counts or len(sizes) > _MAX_DIMENSIONS or prod(sizes) > _MAX_ELEMENTS:
        raise ConfigError(
            f"{shown(name)} has the shape {shown(shape)}, not a list of sizes", path=str(path)
        )
    return Parameter(name, sizes, prod(sizes) * bits // 8, dtype in _FLOATING)


def _read_header(path: Path, most_bytes: int) -> bytes:
    """Read the JSON before the tensors, whose length is in the first eight bytes."""
    try:
        with open_regular(path) as stream:
            start = stream.read(_LENGTH.size)
            if len(start) < _LENGTH.size:
                raise _damaged("the file is shorter than the length of a header", path)
            size = _LENGTH.unpack(start)[0]
            if size > os.fstat(stream.fileno()).st_size:
                raise _damaged("the header is longer than the file", path)
            if size > most_bytes:
                raise _damaged(f"the headers are longer than {MAX_HEADERS_BYTES} bytes", path)
            return stream.read(size)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", hint="expected a safetensors file") from None


def _damaged(reason: str, path: Path) -> ConfigError:
    return ConfigError(f"not a safetensors file: {reason}", path=str(path))


# GGUF: what a file of it weighs, and a model's parameters packed as in one. An engine keeps its
# tensors packed on the device.
#
# Source: GGUFLinearMethod and GGUFEmbeddingMethod in
# vllm/model_executor/layers/quantization/gguf.py, 0.8.2; 3.26 GiB printed there of a Llama-3.2-3B
# whose Q8_0 file has 3.18 GiB, the table of its positions among them.

SUFFIX: Final = ".gguf"
_PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def gguf_bytes(path: Path) -> int | None:
    """Return the bytes of a GGUF file, or of the only one in a folder, its parts together; None
    without one, or with several.
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


def packed(parameters: Sequence[Parameter], file_bytes: int) -> tuple[Parameter, ...]:
    """Return parameters that take what the file has in all, each by its share of the elements.

    Formats differ from tensor to tensor; how the whole is shared out among them matters to ranks
    and stages only.
    """
    elements = sum(parameter.elements for parameter in parameters)
    return tuple(replace(p, bytes=round(p.elements * file_bytes / elements)) for p in parameters)
