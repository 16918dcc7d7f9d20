"""Convert results to bytes and back without pickle, so that reading a store runs no code.

A value is stored as JSON if JSON gives it back unchanged. Tensors and arrays are stored as
safetensors. Lists, tuples and dictionaries may contain all of these.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from typing import Any, Final

from oomguard.core.errors import UsageError
from oomguard.core.installation import install_hint
from oomguard.probe import torch_memory

_JSON = "json"
_BYTES = "bytes"
_TREE = "tree"
_TORCH = "torch"
_NUMPY = "numpy"
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_METADATA: Final = "oomguard"
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class _NotStorableError(TypeError):
    """Report a value whose type cannot be stored; the message is the type."""


class Codec:
    """Convert the results of one call to bytes and back.

    Args:
        encode: converts a result to something that can be stored. None: store it as it is.
        decode: reverses ``encode``.
    """

    def __init__(
        self, encode: Callable[[Any], Any] | None, decode: Callable[[Any], Any] | None
    ) -> None:
        self._encode = encode
        self._decode = decode

    def written(self, value: Any, place: str) -> tuple[str, bytes]:
        """Return the storage form of a result, and its bytes.

        Raises:
            UsageError: its type cannot be stored. The message contains the type and ``place``.
        """
        if self._encode is None:
            shown = value
        else:
            shown = self._encode(value)
        try:
            return _written(shown)
        except _NotStorableError as error:
            hint = (
                "encode=FUNCTION must convert it to JSON, bytes, tensors or arrays; "
                "decode=FUNCTION reverses that"
            )
            raise UsageError(
                f"the result of {place} cannot be stored because it contains a {error}", hint=hint
            ) from None

    def read(self, form: str, content: bytes) -> Any:
        """Return a stored result; raise ValueError or KeyError for invalid bytes."""
        value = _read(form, content)
        if self._decode is None:
            return value
        return self._decode(value)


def _written(value: Any) -> tuple[str, bytes]:
    if type(value) is bytes:
        return _BYTES, value
    if _is_plain(value):
        return _JSON, _text(value)
    tensors: dict[str, Any] = {}
    tree = _tree(value, tensors)
    if not tensors:
        return _TREE, _text(tree)
    metadata = {_METADATA: json.dumps(tree)}
    is_torch = any(hasattr(tensor, "untyped_storage") for tensor in tensors.values())
    save = _safetensors(_TORCH if is_torch else _NUMPY).save
    if is_torch:
        import torch

        tensors = {
            name: t if hasattr(t, "untyped_storage") else torch.from_numpy(t)
            for name, t in tensors.items()
        }
    with torch_memory.on_host():
        return (_TORCH if is_torch else _NUMPY), save(tensors, metadata)


def _read(form: str, content: bytes) -> Any:
    if form == _BYTES:
        return content
    if form == _JSON:
        return json.loads(content)
    if form == _TREE:
        return _grown(json.loads(content), {})
    # A safetensors file begins with 8 bytes for the header's length, then the header as JSON.
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    with torch_memory.on_host():
        return _grown(
            json.loads(header["__metadata__"][_METADATA]), _safetensors(form).load(content)
        )


def _is_plain(value: Any) -> bool:
    """Return whether JSON gives back the same value with the same types."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is list:
        return all(map(_is_plain, value))
    return (
        kind is dict
        and all(type(key) is str for key in value)
        and all(map(_is_plain, value.values()))
    )


def _tree(value: Any, tensors: dict[str, Any]) -> Any:
    """Return a value as JSON, with each other object replaced by ``[its kind, its parts]``."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in (list, tuple):
        return [kind.__name__, [_tree(entry, tensors) for entry in value]]
    if kind is dict:
        return [
            "dict",
            [[_tree(key, tensors), _tree(entry, tensors)] for key, entry in value.items()],
        ]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode("ascii")]
    name = str(len(tensors))
    if hasattr(value, "untyped_storage"):
        tensors[name] = _host(value)
        return ["tensor", name]
    if kind.__module__ == "numpy" and hasattr(value, "dtype"):
        import numpy as np

        if value.dtype.kind not in "biuf" or (kind is not np.ndarray and value.shape):
            raise _NotStorableError(f"numpy.{kind.__name__} of {value.dtype}")
        tensors[name] = np.array(value, order="C")
        return ["array" if kind is np.ndarray else "number", name]
    raise _NotStorableError(
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _grown(tree: Any, tensors: dict[str, Any]) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, made_of = tree
    if kind in ("list", "tuple"):
        entries = [_grown(entry, tensors) for entry in made_of]
        if kind == "tuple":
            return tuple(entries)
        return entries
    if kind == "dict":
        return {_grown(key, tensors): _grown(entry, tensors) for key, entry in made_of}
    if kind == "bytes":
        return base64.b64decode(made_of)
    tensor = tensors[made_of]
    if kind == "tensor":
        return tensor
    if hasattr(tensor, "untyped_storage"):
        array = tensor.numpy()
    else:
        array = tensor
    if kind == "array":
        return array
    return array[()]


def _host(tensor: Any) -> Any:
    """Return a tensor on the CPU without its graph, copied if it is a view."""
    import torch

    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or not isinstance(tensor, torch.Tensor)
    ):
        raise _NotStorableError(f"tensor of layout {tensor.layout}")
    with torch_memory.on_host():
        return tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)


def _text(value: Any) -> bytes:
    return _encode(value).encode("utf-8", "surrogatepass")


def _safetensors(form: str) -> Any:
    try:
        if form == _NUMPY:
            import safetensors.numpy

            return safetensors.numpy
        import safetensors.torch

        return sys.modules["safetensors.torch"]
    except ImportError:
        hint = install_hint("hf")
        raise UsageError(
            "tensors are stored as safetensors, which is not installed", hint=hint
        ) from None
