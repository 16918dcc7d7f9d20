"""Results of models' calls: their tensors, how two of them differ, and a result on the host that
takes nothing of the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Sums of other numbers of rows are made in another order: the last bits of float32 differ, as
# between two batches without a guard.
ATOL = 1e-4
RTOL = 1e-3


@dataclass(frozen=True)
class Kept:
    """A result as it is compared: its type, the names of its fields, and its tensors on
    the host.
    """

    kind: type
    fields: list[str] | None
    tensors: list[Any]

    @classmethod
    def of(cls, result: Any) -> "Kept":
        """Return a result, moved to the host."""
        if isinstance(result, dict):
            fields = list(result)
        else:
            fields = None
        return cls(type(result), fields, [tensor.to("cpu") for tensor in tensors(result)])


def tensors(result: Any) -> Iterator[Any]:
    """Every tensor of a result, in its order."""
    if hasattr(result, "untyped_storage"):
        yield result
    elif hasattr(result, "layers"):  # a cache
        for layer in result.layers:
            yield from (
                held
                for held in (getattr(layer, "keys", None), getattr(layer, "values", None))
                if held is not None
            )
    elif isinstance(result, dict | list | tuple):
        for entry in result.values() if isinstance(result, dict) else result:
            yield from tensors(entry)


def bytes_of(result: Any) -> int:
    """Return the bytes of a result's tensors."""
    return sum(tensor.nbytes for tensor in tensors(result))


def storage_bytes(result: Any) -> int:
    """Return the bytes that a result's tensors keep on the device, those that are shared once."""
    held = (tensor.untyped_storage() for tensor in tensors(result))
    return sum({storage._cdata: storage.nbytes() for storage in held}.values())


def difference(whole: Kept, parts: Kept) -> str:
    """Return how the result under the guard differs from that of the whole call; "" where it does
    not.
    """
    if whole.kind is not parts.kind:
        return f"a {parts.kind.__name__} in place of a {whole.kind.__name__}"
    if whole.fields != parts.fields:
        return f"fields {parts.fields} in place of {whole.fields}"
    if len(whole.tensors) != len(parts.tensors):
        return f"{len(parts.tensors)} tensors in place of {len(whole.tensors)}"
    return next(
        (
            found
            for pair in zip(whole.tensors, parts.tensors, strict=True)
            if (found := _differs(*pair))
        ),
        "",
    )


def _differs(mine: Any, theirs: Any) -> str:
    import torch

    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return f"{tuple(theirs.shape)} {theirs.dtype} in place of {tuple(mine.shape)} {mine.dtype}"
    if not mine.is_floating_point():
        if torch.equal(mine, theirs):
            return ""
        return f"{int((mine != theirs).flatten(1).any(1).sum())} of {len(mine)} rows differ"
    if torch.allclose(mine, theirs, RTOL, ATOL, equal_nan=True):
        return ""
    return f"values differ by {float((mine - theirs).abs().nan_to_num().max()):.2g}"
