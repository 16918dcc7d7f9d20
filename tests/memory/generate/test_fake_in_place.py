"""Attention in a trace holds what it holds on a device, where no mode watches its tensors."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from oomguard.memory.generate.fake_in_place import FakeInPlace  # noqa: E402

functional = torch.nn.functional


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def operations(function, *, in_place):
    """The operations that a function of fake tensors is made of."""
    names = Names()
    with FakeTensorMode(), names, FakeInPlace() if in_place else nullcontext():
        function()
    return names.seen


def masked_attention():
    query, mask = torch.empty(2, 4, 10, 8), torch.empty(2, 1, 10, 10)
    with sdpa_kernel(SDPBackend.MATH):
        assert functional.scaled_dot_product_attention(query, query, query, attn_mask=mask).shape == query.shape


def strided_linear():
    rows = torch.empty(6, 8, 16).transpose(0, 1)
    assert functional.linear(rows, torch.empty(4, 16), torch.empty(4)).shape == (8, 6, 4)


@pytest.mark.parametrize("function", [masked_attention, strided_linear])
def test_what_was_just_made_is_added_to_in_place(function):
    assert "aten::add" in operations(function, in_place=False)
    found = operations(function, in_place=True)
    assert "aten::add_" in found
    assert "aten::add" not in found


def test_other_sums_are_new_tensors():
    def add():
        rows = torch.empty(3, 4)
        assert rows + rows is not rows

    assert "aten::add" in operations(add, in_place=True)
