"""Detection of what texts name: where each image is held against each text, no row is apart."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from beside_text import model_of, noise, words  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402

IMAGES = 20
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {
    **SIZES,
    "vocab_size": 64,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SEES = {**SIZES, "image_size": 64, "patch_size": 8}


def call_of(name, texts):
    model = model_of(name, text_config=TEXT, vision_config=SEES, projection_dim=32)
    ids = words(texts, 16)
    ids[:, 0], ids[:, 8], ids[:, 9:] = 1, 2, 0
    ids[::3, 0] = 0  # a text that only fills up those of its image
    mask = (ids > 0).long()
    mask[:, 0] = 1
    given = {"input_ids": ids, "attention_mask": mask, "pixel_values": noise(IMAGES, 3, 64, 64)}

    def call():
        with torch.no_grad():
            return model(**given)

    return model, call


def half(call):
    with limit_memory("4 GiB") as device:
        whole = call()
    return whole, int(0.6 * device.peak_bytes)


def test_models_that_match_images_with_texts_are_not_split(subtests):
    for name, reason in (
        ("CLIPModel", "logits_per_image has an entry for each pair of rows"),
        ("OwlViTForObjectDetection", "it takes mm over all rows"),
    ):
        with subtests.test(name):
            _, call = call_of(name, 2 * IMAGES)
            _, capacity = half(call)
            with (
                limit_memory(capacity),
                oomguard.guard(),
                pytest.raises(torch.OutOfMemoryError) as caught,
            ):
                call()
            assert reason in "".join(caught.value.__notes__)
