"""Results come back as they were given, types included, and no pickle is in the store."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oomguard
from oomguard.mapping.store import Codec

PLAIN = Codec(None, None)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text()), inner, max_size=4)
    ),
)


def back(value, codec=PLAIN):
    return codec.read(*codec.written(value, "items[0]"))


def typed(value):
    """A value with the types in it, so that 1 and True, a list and a tuple differ."""
    if isinstance(value, (list, tuple)):
        return type(value), [typed(entry) for entry in value]
    if isinstance(value, dict):
        return dict, [(typed(key), typed(entry)) for key, entry in value.items()]
    return type(value), repr(value)


@settings(max_examples=60)
@given(VALUES)
def test_any_value_of_plain_types_comes_back_with_its_types(value):
    assert typed(back(value)) == typed(value)


def test_numbers_that_json_has_not_come_back():
    assert math.isnan(back(math.nan))
    assert back([math.inf, -0.0]) == [math.inf, -0.0]


def test_tensors_come_back_bit_by_bit(subtests):
    for dtype in ["float32", "float16", "bfloat16", "int64", "uint8", "bool"]:
        with subtests.test(dtype=dtype):
            torch = pytest.importorskip("torch")
            tensor = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
            found = back({"layer": 3, "hidden": [tensor, tensor.T, tensor[0, 0]]})
            assert found["layer"] == 3
            for wanted, came in zip([tensor, tensor.T, tensor[0, 0]], found["hidden"], strict=True):
                assert came.dtype == wanted.dtype
                assert torch.equal(came, wanted)


def test_a_view_is_stored_without_what_it_is_cut_from():
    torch = pytest.importorskip("torch")
    form, content = PLAIN.written(torch.zeros(1000, 1000)[0, :2], "items[0]")
    assert form == "torch"
    assert len(content) < 1000


def test_arrays_come_back_as_arrays_beside_tensors_too():
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    alone, (beside, tensor) = back(array), back((array, torch.ones(2)))
    for found in (alone, beside):
        assert type(found) is np.ndarray
        assert found.dtype == np.int16
        assert (found == array).all()
    assert torch.equal(tensor, torch.ones(2))
    assert type(back(np.float32(1.5))) is np.float32


def test_a_value_of_another_type_is_named_with_what_to_do(subtests):
    for name, value in [
        ("object", object()),
        ("set", {1, 2}),
        ("inside", [1, {"a": object()}]),
        ("complex", 1j),
        ("range", range(3)),
    ]:
        with subtests.test(name):
            with pytest.raises(
                oomguard.UsageError,
                match=r"the result of items\[4\] cannot be stored because it contains a",
            ) as caught:
                PLAIN.written(value, "items[4]")
            assert "encode=" in caught.value.hint


def test_encode_and_decode_store_what_has_no_form():
    codec = Codec(sorted, set)
    assert back({3, 1}, codec) == {1, 3}
    assert back(1j, Codec(pickle.dumps, pickle.loads)) == 1j


def test_a_pickle_in_a_store_is_bytes():
    assert back(pickle.dumps([1])) == pickle.dumps([1])
