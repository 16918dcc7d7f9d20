"""Whose each image of a batch is, by the tokens that stand for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.engines.transformers.forward import ForwardCall  # noqa: E402
from oomguard.engines.transformers.inputs import Media, media_of  # noqa: E402

IMAGE = 60


def model(**config):
    vision = SimpleNamespace(spatial_merge_size=2)
    return SimpleNamespace(
        config=SimpleNamespace(image_token_id=IMAGE, vision_config=vision, **config)
    )


def rows(*tokens):
    """Rows with so many image tokens each, other tokens before them."""
    width = max(tokens) + 2
    return torch.tensor([[7] * (width - count) + [IMAGE] * count for count in tokens])


def flat(*grids):
    return {
        "pixel_values": torch.arange(sum(t * h * w for t, h, w in grids)).reshape(-1, 1),
        "image_grid_thw": torch.tensor(grids),
    }


def test_patches_go_with_the_row_whose_tokens_stand_for_them():
    given = flat((1, 4, 4), (1, 2, 4), (1, 2, 2))
    media = media_of(model(), given, rows(4, 3))

    first, second = media.part(given, 0, 1), media.part(given, 1, 2)
    assert first["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert second["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 2]]
    assert second["pixel_values"].flatten().tolist() == list(range(16, 28))


def test_rows_without_an_image_get_none():
    given = flat((1, 4, 4), (1, 4, 4))
    media = media_of(model(), given, rows(8, 0))

    assert media.part(given, 0, 1)["pixel_values"].shape[0] == 32
    assert media.part(given, 1, 2) == {"pixel_values": None, "image_grid_thw": None}


def test_images_of_one_size_are_counted_by_their_tokens():
    given = {"pixel_values": torch.zeros(3, 3, 8, 8)}
    media = media_of(model(), given, rows(20, 10, 0))

    assert media.starts == {"pixel_values": (0, 2, 3, 3)}


def test_media_that_tokens_do_not_count_are_not_cut(subtests):
    for name, given, ids in [
        ("too few tokens", flat((1, 4, 4)), rows(3)),
        ("too many tokens", flat((1, 4, 4)), rows(4, 4)),
        ("patches not counted", {**flat((1, 4, 4)), "pixel_values": torch.zeros(15, 1)}, rows(4)),
        ("no whole image", {"pixel_values": torch.zeros(3, 3, 8, 8)}, rows(15, 15)),
        ("no token", {"pixel_values": torch.zeros(2, 3, 8, 8)}, rows(0, 0)),
        ("an axis more", {"pixel_values": torch.zeros(2, 2, 3, 8, 8)}, rows(4, 4)),
        ("a list", {"pixel_values": [torch.zeros(3, 8, 8)] * 2}, rows(4, 4)),
    ]:
        with subtests.test(name):
            assert "does not know which rows the argument" in media_of(model(), given, ids)


def test_a_model_without_a_token_for_images_is_not_cut():
    plain = SimpleNamespace(config=SimpleNamespace())

    assert "no token stands for it" in media_of(plain, flat((1, 4, 4)), rows(4, 0))
    assert media_of(plain, {"attention_mask": torch.ones(2, 4)}, rows(2, 2)) == Media({})


def test_a_call_of_a_model_is_cut_with_its_images():
    class Seeing(torch.nn.Module):
        config = model().config

        def forward(self, input_ids, attention_mask, pixel_values, image_grid_thw):
            return input_ids

    ids = rows(4, 4)
    given = {"attention_mask": torch.ones_like(ids), **flat((1, 4, 4), (1, 4, 4))}
    call = ForwardCall.of(Seeing().eval(), (ids,), given)

    assert "Seeing is your own code" in call.not_splittable
    args, kwargs = call.part(1, 2)
    assert (
        args[0].shape[0]
        == kwargs["attention_mask"].shape[0]
        == kwargs["image_grid_thw"].shape[0]
        == 1
    )
    assert kwargs["pixel_values"].flatten().tolist() == list(range(16, 32))
