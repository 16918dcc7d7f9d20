"""A function that gives several things a row, in a dict or a tuple: each is put together by itself."""

from __future__ import annotations

import collections
from typing import NamedTuple

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import limit_memory  # noqa: E402

WIDTH = 2**18  # 1 MiB of float32


class Scored(NamedTuple):
    scores: object
    names: object


def work(rows, make):
    values = torch.ones(len(rows), WIDTH).cumsum(1)[:, -1] * torch.tensor(rows)
    return make(values, [f"row {row}" for row in rows])


MAKERS = {
    "dict": lambda values, names: {"values": values, "names": names},
    "with a default": lambda values, names: collections.defaultdict(
        list, {"values": values, "names": names}
    ),
    "tuple": lambda values, names: (values, values.int(), names),
    "named": Scored,
    "arrays": lambda values, names: {"values": values.numpy(), "names": tuple(names)},
}


def test_each_field_is_that_of_the_whole_call(subtests):
    for name, value in MAKERS.items():
        rows = 18
        with subtests.test(name=name, rows=rows):
            given, make = list(range(rows)), value
            whole = work(given, make)
            with limit_memory("8 MiB"), oomguard.guard():
                parts = oomguard.guard(batch="rows")(work)(given, make)

            assert type(parts) is type(whole)
            keys = list(whole) if isinstance(whole, dict) else range(len(whole))
            assert not isinstance(whole, dict) or list(parts) == list(whole)
            for key in keys:
                assert type(parts[key]) is type(whole[key])
                assert list(parts[key]) == list(whole[key])


def test_a_field_that_is_not_of_rows_keeps_the_call_whole(subtests):
    def check(make, why):
        @oomguard.guard(batch="rows")
        def odd(rows):
            torch.zeros(len(rows), WIDTH)
            return make(rows)

        with limit_memory("8 MiB"), pytest.raises(torch.OutOfMemoryError) as raised:
            odd(list(range(16)))
        assert f"not run in parts: {why}" in "".join(raised.value.__notes__)

    for name, make, why in [
        ("a number", lambda rows: {"mean": float(len(rows))}, "its result is a dict"),
        (
            "a number beside rows",
            lambda rows: {"rows": rows, "mean": torch.ones(())},
            "its result is a dict",
        ),
        (
            "other names",
            lambda rows: {f"row {rows[0]}": rows},
            "its results have different fields",
        ),
        (
            "another length",
            lambda rows: (rows, [1] * 99),
            "its result has 2 entries for 1 rows",
        ),
    ]:
        with subtests.test(name):
            check(make, why)
