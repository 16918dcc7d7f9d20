"""Calls with images, videos and sounds beside text run in parts where it is known whose each of them is."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from beside_text import (  # noqa: E402
    CALLS,
    idefics3,
    llava_onevision,
)
from model_calls import assert_same, ordinary  # noqa: E402

from oomguard.engines.transformers.generate import GenerateCall  # noqa: E402
from oomguard.testing import limit_memory  # noqa: E402


def test_rows_go_with_what_belongs_to_them_and_give_the_same(subtests):
    for name in CALLS:
        with subtests.test(name=name):
            model, call = CALLS[name]()
            weights = sum(parameter.nbytes for parameter in (*model.parameters(), *model.buffers()))
            with limit_memory("4 GiB") as device:
                whole = call()
                capacity = int(weights + 0.7 * (device.peak_bytes - weights))
            with limit_memory(capacity), pytest.raises(torch.OutOfMemoryError):
                call()
            with limit_memory(capacity), oomguard.guard() as g:
                parts = call()

            assert_same(whole, ordinary(parts))
            assert g.attempts[-1].succeeded
            assert [patch.setting for patch in g.attempts[1].patches] == ["batch_size"]


def read(model, call):
    """The call of a program's ``generate``, with other arguments in it."""
    given = call.__closure__[0].cell_contents
    return lambda **changed: GenerateCall.of(model, (), {**given, **changed})


def test_images_with_tokens_in_another_row_are_not_cut():
    model, call = idefics3()
    made = read(model, call)
    given = made().kwargs
    assert made().not_splittable is None
    assert made().part(1, 3)[1]["pixel_values"].shape[0] == 2

    swapped = {
        "pixel_values": given["pixel_values"].flip(0),
        "pixel_attention_mask": given["pixel_attention_mask"].flip(0),
    }
    assert (
        "the text's tokens do not match it"
        in made(**{n: v.roll(1, 0) for n, v in swapped.items()}).not_splittable
    )
    assert (
        "does not have one entry per row"
        in made(pixel_attention_mask=given["pixel_attention_mask"][:3]).not_splittable
    )


def test_images_that_the_call_counts_otherwise_are_not_cut():
    model, call = llava_onevision()
    made = read(model, call)
    given = made().kwargs
    assert made().part(1, 2)[1]["image_sizes"].shape[0] == 3

    assert (
        "batch_num_images does not match it"
        in made(batch_num_images=given["batch_num_images"] + 1).not_splittable
    )
    assert "image_sizes has 3 entries" in made(image_sizes=given["image_sizes"][:3]).not_splittable
    assert "the text's tokens do not match it" in made(batch_num_images=None).not_splittable
