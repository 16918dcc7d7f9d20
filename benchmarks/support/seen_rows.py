"""The rows that a guarded call computed: those that the model's first layer saw, and those whose results were put together."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def rows_seen(model: Any, inputs: dict[str, Any], kind: str) -> Iterator[list[int]]:
    """Count the rows of the inputs that the model's first layer sees, call by call; those of a trace do not count.

    Args:
        model: the model.
        inputs: what it is called with.
        kind: what they are: ``text``, ``images`` or ``sound``.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    seen: list[int] = []
    length = next(iter(inputs.values())).shape[1:]
    kinds = {"text": (torch.nn.Embedding,), "images": (torch.nn.Conv2d,), "sound": (torch.nn.Conv1d,)}[kind]
    own = {layer: layer.forward for layer in kinds}

    def counted(layer: Any) -> Any:
        def forward(module: Any, given: Any, *more: Any, **others: Any) -> Any:
            shape = given.shape[1:] if kind != "sound" else given.shape[2:]
            # Tables of positions, or of distances between them, are looked up too: not with rows.
            is_first = layer is not torch.nn.Embedding or module.weight is model.get_input_embeddings().weight
            if is_first and shape == length and not isinstance(given, FakeTensor):
                seen.append(len(given))
            return own[layer](module, given, *more, **others)

        return forward

    for layer in kinds:
        layer.forward = counted(layer)
    try:
        yield seen
    finally:
        for layer in kinds:
            layer.forward = own[layer]


@contextlib.contextmanager
def parts_joined() -> Iterator[list[int]]:
    """Note the rows of each part whose result a guard puts into its place, in their order: a part that failed is not there.

    A guard's settings have the last size alone, and parts that ran before a second failure had another.
    """
    from oomguard.guarding.gathered import Gathered

    sizes: list[int] = []
    add = Gathered.add

    def noted(gathered: Gathered, part: Any, rows: int) -> str | None:
        if not gathered.done:
            sizes.clear()  # begun again
        problem = add(gathered, part, rows)
        if problem is None:
            sizes.append(rows)
        return problem

    Gathered.add = noted  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        Gathered.add = add  # type: ignore[method-assign]
