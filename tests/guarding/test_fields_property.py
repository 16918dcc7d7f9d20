"""Rows of a record stay in order, none is lost and none is doubled, however a call is cut and whatever it returns."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from transformers.modeling_outputs import BaseModelOutputWithPast  # noqa: E402

from oomguard.guarding.collate import OutputCollector  # noqa: E402


def record_of(rows, shape):
    """A record whose every tensor tells its row, of one of the shapes that models return."""
    first = torch.tensor(rows, dtype=torch.float32)[:, None].expand(-1, 3)
    second = torch.tensor(rows)[:, None, None, None].expand(-1, 2, 1, 4).clone()
    if shape == "tuple":
        return first, (second, None), [second]
    if shape == "nested":
        return {"a": first, "b": ({"c": second},), "flag": True, "name": "x"}
    cache = transformers.DynamicCache()
    cache.update(second.float(), second.float() + 0.5, 0)
    return BaseModelOutputWithPast(
        last_hidden_state=first, past_key_values=cache, hidden_states=(first, first)
    )


def tensors_of(record):
    if isinstance(record, torch.Tensor):
        return [record]
    if isinstance(record, dict):
        return [tensor for value in record.values() for tensor in tensors_of(value)]
    if isinstance(record, (list, tuple)):
        return [tensor for value in record for tensor in tensors_of(value)]
    if hasattr(record, "layers"):
        return [tensor for layer in record.layers for tensor in (layer.keys, layer.values)]
    return []


def test_rows_are_kept_in_order_none_lost_or_doubled(subtests):
    def check(shape, seed):
        chance = random.Random(seed)
        total = chance.randint(1, 40)
        rows = [chance.randint(0, 9999) for _ in range(total)]
        gathered, start = OutputCollector(total, weigh=lambda *_: None), 0
        while start < total:
            size = chance.randint(1, total - start)
            assert gathered.add(record_of(rows[start : start + size], shape), size) is None
            start += size
            if chance.random() < 0.2:
                gathered.park()
        whole, joined = record_of(rows, shape), gathered.result()
        assert type(joined) is type(whole)
        pairs = list(zip(tensors_of(whole), tensors_of(joined), strict=True))
        assert pairs
        assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)

    for shape in ["tuple", "nested", "output"]:
        for seed in range(20):
            with subtests.test(shape=shape, seed=seed):
                check(shape, seed)


def test_a_part_with_another_shape_of_record_is_refused():
    gathered = OutputCollector(4, weigh=lambda *_: None)
    assert gathered.add((torch.zeros(2, 3), None), 2) is None
    assert "differ in more than their rows" in gathered.add((torch.zeros(2, 3), torch.zeros(2)), 2)


def test_a_field_without_one_entry_a_row_is_refused(subtests):
    def check(wrong):
        assert (
            OutputCollector(4, weigh=lambda *_: None).add(
                {"logits": torch.zeros(2, 3), "other": wrong}, 2
            )
            is not None
        )

    for wrong in [torch.zeros(3, 2), torch.zeros(1, 2), torch.zeros(())]:
        with subtests.test(wrong=wrong):
            check(wrong)


def test_a_mean_is_weighted_by_what_it_is_the_mean_of(subtests):
    def check(counts):
        values = [torch.tensor(2.0), torch.tensor(6.0) if counts[1] else torch.tensor(float("nan"))]
        weights = iter(float(count) for count in counts)
        gathered = OutputCollector(2, weigh=lambda *_: next(weights))
        for value in values:
            assert gathered.add({"loss": value, "logits": torch.zeros(1, 2)}, 1) is None
        expected = torch.tensor({(3, 1): 3.0, (5, 0): 2.0, (0, 0): float("nan")}[counts])
        torch.testing.assert_close(gathered.result()["loss"], expected, equal_nan=True)

    for counts in [(3, 1), (5, 0), (0, 0)]:
        with subtests.test(counts=counts):
            check(counts)


def test_a_part_that_one_field_does_not_take_is_in_none_of_them(subtests):
    for name, weigh in [
        ("a model's", lambda *_: 1.0),
        ("a function's", None),
    ]:
        with subtests.test(name):
            gathered = OutputCollector(6, weigh=weigh)
            for size, width in ((2, 3), (2, 3), (2, 5)):
                part = {
                    "first": torch.full((size, 3), float(width)),
                    "second": torch.full((size, width), float(width)),
                }
                part |= {} if weigh is None else {"loss": torch.tensor(float(width))}
                problem = gathered.add(part, size)
            assert "different shapes" in problem
            finished = gathered.finished()
            assert (
                gathered.done,
                {name: len(value) for name, value in finished.items() if value.dim()},
            ) == (
                4,
                {"first": 4, "second": 4},
            )
            assert float(finished.get("loss", torch.tensor(3.0))) == 3.0
