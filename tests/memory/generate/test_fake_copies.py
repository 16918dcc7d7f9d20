"""What a trace makes of ``copy.deepcopy``: torch's own copy of a fake tensor ends the process once it is freed."""

from __future__ import annotations

import copy
import gc

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

from oomguard.memory.generate.fake_copies import FakeCopies  # noqa: E402


def test_a_copy_of_a_constant_is_a_fake_tensor_of_its_own():
    with FakeTensorMode(), FakeCopies():
        ends = torch.tensor([1, 2])
        copied = copy.deepcopy({"ends": ends, "again": [ends]})
    assert isinstance(copied["ends"], FakeTensor)
    assert copied["ends"] is copied["again"][0]
    assert copied["ends"] is not ends
    assert (copied["ends"].shape, copied["ends"].dtype) == (ends.shape, ends.dtype)


def test_copies_are_freed_once():
    for number in range(30):
        with FakeTensorMode(), FakeCopies():
            copy.deepcopy([torch.tensor([number]), torch.empty(number + 1)])
        gc.collect()


def test_real_tensors_are_copied_as_ever():
    given = torch.arange(3)
    with FakeCopies():
        copied = copy.deepcopy(given)
    assert torch.equal(copied, given)
    assert copied.data_ptr() != given.data_ptr()
