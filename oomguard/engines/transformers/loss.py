"""Find the weight of some rows' mean loss in the mean over all rows.

It is known if a standard loss of their logits and labels gives the same value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

LABELS: Final = ("labels", "start_positions", "end_positions")
_IGNORED: Final = -100
_TOLERANCE: Final = 1e-4
_HALF_TOLERANCE: Final = 2e-2
_CLEARLY: Final = 10


def loss_weight(result: Any, labels: Mapping[str, Any], over: float | None = None) -> float | None:
    """Return the number of labels in a result's mean loss; None if no known mean gives it.

    Args:
        result: the result for some rows.
        labels: the labels of these rows.
        over: the number by which the caller divides the sum of all losses
            (``num_items_in_batch``); None: none. It is the same for every part, so their losses add
            up and the weight is infinite.
    """
    import torch

    loss, logits = _loss_and_logits(result)
    if loss is None or not logits:
        return None
    if loss.dtype in (torch.float32, torch.float64):
        tolerance = _TOLERANCE
    else:
        tolerance = _HALF_TOLERANCE
    shown_loss = loss.detach().double().cpu()
    means = list(_means(logits, labels))
    if over and any(
        torch.isclose(shown_loss, torch.tensor(total / over).double(), tolerance, 1e-7)
        for total, _ in means
    ):
        return math.inf
    found: dict[float, float] = {}  # by number of labels: the difference to their mean
    for total, count in means:
        mean = torch.tensor(total / count if count else float("nan")).double()
        if torch.isclose(shown_loss, mean, tolerance, 1e-7, equal_nan=True):
            off = float((shown_loss - mean).abs().nan_to_num())
            found[float(count)] = min(off, found.get(float(count), off))
    if not found:
        return None
    # If all labels are equally likely, several means are close. The intended one is equal up to
    # the last bits of float32.
    nearest, *others = sorted(found, key=lambda count: found[count])
    if any(found[other] < _CLEARLY * found[nearest] for other in others):
        return None
    return nearest


def _loss_and_logits(result: Any) -> tuple[Any, list[Any]]:
    entries: Any = []
    if hasattr(result, "values"):
        entries = list(result.values())
    elif isinstance(result, tuple):
        entries = result
    tensors = [entry for entry in entries if hasattr(entry, "untyped_storage")]
    if not tensors or tensors[0].dim() or entries[0] is not tensors[0]:
        return None, []
    return tensors[0], tensors[1:]


def _means(logits: list[Any], labels: Mapping[str, Any]) -> Iterator[tuple[float, int]]:
    """Yield the sum and the count of each loss that the mean may be of."""
    if "labels" not in labels:
        yield from _of_spans(logits, labels)
        return
    first = logits[0]
    wanted = labels["labels"]
    if wanted.is_floating_point():
        yield from _of_numbers(first, wanted)
    elif first.dim() == wanted.dim() + 1 and first.shape[:-1] == wanted.shape:
        yield _cross_entropy(first, wanted)
        if wanted.dim() == 2:  # each position predicts the next one
            yield _cross_entropy(first[:, :-1], wanted[:, 1:])
    elif wanted.numel() == first.shape[0] and first.dim() == 2:
        yield _cross_entropy(first, wanted.reshape(-1))


def _cross_entropy(logits: Any, labels: Any) -> tuple[float, int]:
    """Return the loss sum over all labels that are not ignored, and their number.

    It is computed row by row, so it needs memory for one row only.
    """
    import torch

    total = 0.0
    for row, wanted in zip(logits, labels, strict=True):
        flat = row.reshape(-1, row.shape[-1]).float()
        target = wanted.reshape(-1).to(flat.device)
        total += float(
            torch.nn.functional.cross_entropy(flat, target, ignore_index=_IGNORED, reduction="sum")
        )
    return total, int((labels != _IGNORED).sum())


def _of_numbers(logits: Any, labels: Any) -> Iterator[tuple[float, int]]:
    import torch

    if logits.numel() != labels.numel():
        return
    flat = logits.reshape(labels.shape).float()
    wanted = labels.to(logits.device).float()
    yield float(torch.nn.functional.mse_loss(flat, wanted, reduction="sum")), labels.numel()
    yield (
        float(torch.nn.functional.binary_cross_entropy_with_logits(flat, wanted, reduction="sum")),
        labels.numel(),
    )


def _of_spans(logits: list[Any], labels: Mapping[str, Any]) -> Iterator[tuple[float, int]]:
    """Yield the mean loss of span starts and ends; positions outside the row are ignored."""
    starts = labels.get("start_positions")
    ends = labels.get("end_positions")
    if starts is None or ends is None or len(logits) < 2:
        return
    places = [position.reshape(-1) for position in (starts, ends)]
    length = logits[0].shape[-1]
    if any(bool(((place < 0) | (place >= length)).any()) for place in places):
        return
    sums = [_cross_entropy(tensor, place)[0] for tensor, place in zip(logits, places, strict=False)]
    yield sum(sums) / 2, int(places[0].numel())


def no_weight(part: Any, start: int, stop: int) -> None:
    """Return None: no result of rows ``start`` to ``stop`` is known to be a mean over them."""
    del part, start, stop
