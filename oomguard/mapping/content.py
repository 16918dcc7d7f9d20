"""What a value is, as bytes that are the same in every process: equal content has an equal digest.

JSON-able values count by their JSON (a tuple is its list), tensors and arrays by type, shape and bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from pathlib import PurePath
from typing import Any, Final

from oomguard.observe import torch_memory

DIGEST_BYTES: Final = 16


class UnknownContentError(TypeError):
    """A value whose content cannot be told; the message is its type."""


def digest(value: Any) -> bytes:
    """Return the digest of a value's content.

    Raises:
        UnknownContentError: it, or something in it, is neither JSON-able nor a tensor, an array, bytes or a path.
    """
    if isinstance(value, str):
        text = "t" + value
    else:
        try:
            text = "j" + _encode(value)
        except UnknownContentError:
            raise
        except (TypeError, ValueError, RecursionError) as error:  # keys of several types, a list that holds itself
            raise UnknownContentError(f"{_name(type(value))}: {error}") from None
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def _stand_in(value: Any) -> Any:
    """Return something JSON-able that stands for a value which is not."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": _hashed(value)}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if hasattr(value, "untyped_storage"):
        return {"tensor": [str(value.dtype), list(value.shape), _hashed(_tensor_bytes(value))]}
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject:
        return {"array": [str(value.dtype), list(value.shape), _hashed(value.tobytes())]}
    raise UnknownContentError(_name(type(value)))


_encode: Final[Callable[[Any], str]] = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_stand_in
).encode


def _hashed(content: Any) -> str:
    return blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def _tensor_bytes(tensor: Any) -> bytes:
    import torch

    with torch_memory.on_host():
        host = tensor.detach().to("cpu").contiguous().reshape(-1)
        return bytes(host.view(torch.uint8).numpy())


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
