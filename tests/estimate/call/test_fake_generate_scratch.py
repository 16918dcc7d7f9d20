"""Blocks that kernels take beside tensors, by operation; the figures were measured on an H100."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from oomguard.estimate.call.fake_generate import KernelScratch  # noqa: E402

aten = torch.ops.aten


def blocks(operation, *args, **kwargs):
    return KernelScratch("cuda").blocks_bytes(operation, args, kwargs, operation(*args, **kwargs))


def test_sampling_takes_as_much_as_the_probabilities():
    assert blocks(aten.multinomial.default, torch.ones(153, 3200), 1) == ([], [153 * 3200 * 4])


def test_what_torch_measures_of_a_sort_is_taken():
    assert blocks(aten.sort.default, torch.zeros(160, 8000)) == (
        [],
        [8 * 160 * 8000, 12 * 160 * 8000, 1],
    )
    assert blocks(aten.sort.default, torch.zeros(104, 8000)) == ([], [6656000, 9984000, 9984000])


def test_an_operation_takes_as_many_blocks_whatever_its_sizes():
    assert len(blocks(aten.topk.default, torch.zeros(2, 50), 4)[1]) == len(
        blocks(aten.topk.default, torch.zeros(104, 8000), 4)[1]
    )


def test_softmax_that_is_safe_looks_for_rows_of_nothing():
    assert blocks(aten._safe_softmax.default, torch.zeros(3, 4, 5, 8), -1) == (
        [],
        [3 * 4 * 5 * 8, 3 * 4 * 5],
    )


def test_only_what_does_not_lie_in_order_is_copied_first():
    rows = torch.zeros(4, 6, 8)
    norm = (aten.native_layer_norm.default, [4], None, None, 1e-5)
    assert blocks(norm[0], rows.transpose(1, 2)[..., :4].contiguous(), *norm[1:]) == ([1], [])
    assert blocks(norm[0], rows.transpose(1, 2)[..., :4], *norm[1:]) == ([4 * 8 * 4 * 4], [])
    assert blocks(aten.sum.default, torch.ones(90, 136, dtype=torch.bool)) == ([97920], [])
    assert blocks(aten.sum.default, torch.ones(90, 136)) == ([1], [])


def test_a_grouped_convolution_goes_on_without_its_workspace():
    options = ([1], [8], [1], False, [0])
    sound, weight = torch.zeros(2, 8, 50), torch.zeros(8, 2, 16)
    assert blocks(aten.convolution.default, sound, weight, None, *options, 4) == (
        [1],
        [-(2 * 8 * 50 + 2 * 8 * 51) * 4],
    )
    deep = torch.zeros(8, 1, 16)  # of its own channel only
    assert blocks(aten.convolution.default, sound, deep, None, *options, 8) == ([1], [-1])


def test_nothing_is_known_of_other_operations_and_devices():
    rows = torch.zeros(3, 4)
    assert blocks(aten.relu.default, rows) is None
    assert KernelScratch("cpu").blocks_bytes(aten.multinomial.default, (rows, 1), {}, rows) is None
    assert KernelScratch(None).blocks_bytes(aten.multinomial.default, (rows, 1), {}, rows) is None
