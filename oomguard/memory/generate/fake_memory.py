"""The memory of tensors in a trace: a fake tensor has none, and code that reads it at an address would end the process.

torch (2.13) hands out the address 0 for it, and ``apply_`` writes there. Libraries compare addresses, which is harmless; code of the
user's own hands them to ctypes, to a kernel or to another library. As fake_generate.py this imports torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

_CHANGED_BY_PYTHON: Final = frozenset({torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_})
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})


class FakeMemory(TorchFunctionMode):  # type: ignore[misc]
    """Raises RuntimeError where a function of Python's is run on each number of a fake tensor, or own code asks for its address."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = func in _CHANGED_BY_PYTHON or (func is torch.Tensor.data_ptr and not _is_installed(sys._getframe(1)))
        if reads and any(isinstance(arg, FakeTensor) for arg in args):
            raise RuntimeError("Cannot access data pointer of a fake tensor")  # as torch says where it knows of it
        return func(*args, **(kwargs or {}))


def _is_installed(frame: Any) -> bool:
    return not _INSTALLED.isdisjoint(Path(frame.f_code.co_filename).parts)
