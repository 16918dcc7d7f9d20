"""Copies of tensors in a trace: what ``copy.deepcopy`` makes of a fake tensor, by an operation that has a shape and a size.

torch 2.13 itself copies what stands behind a fake tensor made of constants (``torch.tensor([1])``, as tokens that end a row are): it
raises, and what it leaves half made is freed twice, which ends the process. Models copy tensors as they run: those with an assistant
copy the configuration of ``generate`` and the cache. As fake_generate.py this imports torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode


class FakeCopies(TorchFunctionMode):  # type: ignore[misc]
    """Has a fake tensor copied by ``clone``, once for each tensor in what is copied, and one number of it written as a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_fake = bool(args) and isinstance(args[0], FakeTensor)
        if func is torch.Tensor.__format__ and is_fake and not args[0].dim():
            return format(args[0].item(), *args[1:])  # as of one that is not fake: a name with a number in it
        if func is not torch.Tensor.__deepcopy__ or not is_fake:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            memo[id(tensor)] = torch.nn.Parameter(copied) if isinstance(tensor, torch.nn.Parameter) else copied
        return memo[id(tensor)]
