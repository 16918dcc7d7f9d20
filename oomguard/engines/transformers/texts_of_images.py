"""Calls with several texts for each image, which are the rows: detection of what texts name, as OWL-ViT reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oomguard.engines.transformers.media import Media, data
from oomguard.engines.transformers.tensors import is_tensor


def texts_of_images(model: Any, arguments: Mapping[str, Any]) -> tuple[Media, int, int] | None:
    """Return whose each text and image is, the images, and the texts of each; None of another model or call."""
    names = {base.__name__ for base in type(model).__mro__}
    found = next((kind for kind in data()["texts_of_images"] if names & set(kind["classes"])), None)
    images: Any = None if found is None else arguments.get(found["images"])
    if found is None or not is_tensor(images) or not images.ndim:
        return None
    texts = {name: arguments[name] for name in found["texts"] if arguments.get(name) is not None}
    sizes = {text.shape[0] if is_tensor(text) and text.ndim > 1 else None for text in texts.values()}
    rows, size = images.shape[0], next(iter(sizes), None)
    if len(sizes) != 1 or size is None or not rows or size % rows:
        return None
    starts = dict.fromkeys(texts, tuple(range(0, size + 1, size // rows)))
    return Media({**starts, found["images"]: tuple(range(rows + 1))}), rows, size // rows
