"""Functions that add to what they have just made, in place on a device, yet to another tensor under a mode or with fake tensors.

torch (2.11 to 2.13) adds the mask to the scores of attention, and the bias to the product of a strided input, so: ATen/native's
``_scaled_dot_product_attention_math`` and ``linear``, where they ask for ``isTensorSubclassLike``. One such tensor more moves every
block behind it. As fake_generate.py this imports torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_FUNCTIONS: Final = frozenset({torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.linear})
_ADD: Final = torch.ops.aten.add.Tensor
_ADD_IN_PLACE: Final = torch.ops.aten.add_.Tensor


def as_on_device(device_type: str | None) -> AbstractContextManager[object]:
    """Return what has these functions add as on a device of that type; the simulated one is a mode itself."""
    return FakeInPlace() if device_type == "cuda" else nullcontext()


class FakeInPlace(TorchFunctionMode):  # type: ignore[misc]
    """Has these functions add in place, as on a device whose tensors no mode watches."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FUNCTIONS:
            return func(*args, **(kwargs or {}))
        with _InPlace():
            return func(*args, **(kwargs or {}))


class _InPlace(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD and torch.broadcast_shapes(args[0].shape, args[1].shape) == args[0].shape:
            return _ADD_IN_PLACE(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
