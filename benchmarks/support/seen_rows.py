"""The rows that a guarded call computed: those that the model's first layer saw, and those whose
results were put together.
"""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def rows_seen(model: Any, inputs: dict[str, Any], kind: str) -> Iterator[list[int]]:
    """Count the rows of the inputs that the model's first layer sees, call by call.

    Args:
        model: the model.
        inputs: what it is called with.
        kind: what they are: ``text``, ``images`` or ``sound``.
    """

    import torch

    seen: list[int] = []
    length = next(iter(inputs.values())).shape[1:]
    name = {"text": "embedding", "images": "conv2d", "sound": "conv1d"}[kind]
    if kind == "text":
        owner = torch
    else:
        owner = torch.nn.functional
    own = getattr(owner, name)

    def counted(one: Any, other: Any, *more: Any, **others: Any) -> Any:
        weight, given = (one, other) if kind == "text" else (other, one)
        if kind != "sound":
            shape = given.shape[1:]
        else:
            shape = given.shape[2:]
        # Tables of positions, or of distances between them, are looked up too: not with rows.
        is_first = kind != "text" or weight is model.get_input_embeddings().weight
        if is_first and shape == length:
            seen.append(len(given))
        return own(one, other, *more, **others)

    setattr(owner, name, counted)
    try:
        yield seen
    finally:
        setattr(owner, name, own)


@contextlib.contextmanager
def parts_joined() -> Iterator[list[int]]:
    """Note the rows of each part whose result a guard puts into its place, in their order: a part
    that failed is not there.

    A guard's settings have the last size alone, and parts that ran before a second failure had
    another.
    """
    from oomguard.guarding.collate import OutputCollector

    sizes: list[int] = []
    add = OutputCollector.add

    def noted(gathered: OutputCollector, part: Any, rows: int) -> str | None:
        if not gathered.done:
            sizes.clear()  # begun again
        problem = add(gathered, part, rows)
        if problem is None:
            sizes.append(rows)
        return problem

    OutputCollector.add = noted  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        OutputCollector.add = add  # type: ignore[method-assign]
