"""What reads the memory of a fake tensor raises: there is none, and the process would end."""

from __future__ import annotations

import ctypes

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from oomguard.memory.generate.fake_memory import FakeMemory  # noqa: E402


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: (ctypes.c_float * 4).from_address(tensor.data_ptr())[0],
        lambda tensor: tensor.apply_(lambda number: number * 2),
        lambda tensor: tensor.map_(torch.ones(4), lambda one, other: one + other),
    ],
    ids=["an address for ctypes", "apply_", "map_"],
)
def test_what_reads_a_fake_tensor_s_memory_raises(read):
    with FakeTensorMode(), FakeMemory(), pytest.raises(RuntimeError, match="data pointer"):
        read(torch.ones(4))


def test_a_real_tensor_is_read_as_ever():
    given = torch.ones(2)
    with FakeMemory():
        assert (ctypes.c_float * 2).from_address(given.data_ptr())[1] == 1.0
        assert given.apply_(lambda number: number * 2).tolist() == [2.0, 2.0]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_installed_code_may_compare_addresses():
    with FakeTensorMode(), FakeMemory():
        compiled = compile("found = tensor.data_ptr()", "/env/site-packages/library/file.py", "exec")
        exec(compiled, space := {"tensor": torch.ones(2)})
        assert space["found"] == 0
