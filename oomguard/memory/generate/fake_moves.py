"""Modules of a trace that a model's code moves to another kind of number or another device (``router.to(torch.float32)``).

torch 2.13 exchanges the weights of such a module for the new ones in place, which it cannot do with fake tensors. As
fake_generate.py this imports torch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


@contextlib.contextmanager
def moving_fakes() -> Iterator[None]:
    """Have modules of fake tensors take new ones in place of those that they have, in this thread."""
    torchs, own = torch.nn.Module._apply, threading.get_ident()

    def apply(self: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        tensors = [*self.parameters(recurse=recurse), *self.buffers(recurse=recurse)]
        if threading.get_ident() != own or not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return torchs(self, fn, recurse)
        for module in self.modules() if recurse else [self]:
            for held in (module._parameters, module._buffers):
                held.update({name: _moved(tensor, fn) for name, tensor in held.items()})
        return self

    torch.nn.Module._apply = apply
    try:
        yield
    finally:
        torch.nn.Module._apply = torchs


def _moved(tensor: Any, fn: Callable[[Any], Any]) -> Any:
    if tensor is None:
        return None
    with torch.no_grad():
        moved = fn(tensor)
    if moved is tensor or not isinstance(tensor, torch.nn.Parameter):
        return moved
    return torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
