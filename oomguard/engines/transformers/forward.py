"""Run the outermost call of a model's forward in parts that give the same rows in order."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.facts import FactValue
from oomguard.engines.transformers.call_state import join_row_state
from oomguard.engines.transformers.forward_variants import (
    has_leading_padding,
    run_in_chunks,
    use_attention,
    why_not_in_chunks,
    why_not_use_attention,
)
from oomguard.engines.transformers.independence import (
    common_rows,
    guard_advice,
    infer_row_arguments,
    is_cut,
    is_input,
    layout_of,
    names,
    records_gradients,
    why_drawn,
    why_not_rows,
    why_over_batch,
    why_rows_depend,
)
from oomguard.engines.transformers.inputs import (
    Media,
    data,
    given_cache,
    is_tensor,
    media_of,
    tensors,
)
from oomguard.probe import torch_memory

if TYPE_CHECKING:
    from oomguard.engines.transformers.call_state import Draws

# For each part by its first row: the result fields that belong to images, moved to the host.
Stored = dict[int, Mapping[str, Any]]
_OTHERWISE: Final = "the image outputs of the parts differ in more than the images"


def store_image_fields(result: Any, names: tuple[str, ...], stored: Stored, start: int) -> Any:
    """Return a part's result without these fields, which go into ``stored``."""
    own = {}
    rest = {}
    if isinstance(result, Mapping):
        for name, value in result.items():
            if name in names and value is not None:
                own[name] = _changed(value, _OnHost)
            else:
                rest[name] = value
    # The first part may run several times, because a call can begin again with other settings.
    if start == 0:
        stored.clear()
    stored[start] = own
    if own:
        return type(result)(**rest)
    return result


def join_image_fields(result: Any, stored: Stored, place: Callable[[Any, Any], Any]) -> Any:
    """Return the result of all rows with the stored fields of its parts joined.

    ``place`` moves each tensor to a device.

    Raises:
        ValueError: the parts differ in more than their images.
    """
    parts = [stored[start] for start in sorted(stored)]
    fields: dict[str, list[Any]] = {}
    for part in parts:
        # A part of rows without an image has no such field.
        for name, value in part.items():
            fields.setdefault(name, []).append(value)
    joined = {name: _joined(values, place, depth=None) for name, values in fields.items()}
    if joined:
        return type(result)(**{**result, **joined})
    return result


class _OnHost:
    """A tensor moved to the host, with its original device."""

    def __init__(self, tensor: Any) -> None:
        self.device = tensor.device
        self.tensor = torch_memory.to_host(tensor)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a record with each tensor in it replaced by ``change(tensor)``."""
    if hasattr(value, "untyped_storage"):
        return change(value)
    if isinstance(value, Mapping):
        return type(value)(**{name: _changed(entry, change) for name, entry in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_changed(entry, change) for entry in value)
    return value


def _joined(values: list[Any], place: Callable[[Any, Any], Any], *, depth: int | None) -> Any:
    """Return the records of several parts as one, with tensors joined along their first axis.

    ``depth`` is the number of lists around the one with an entry per image; None without one.
    """
    first = values[0]
    if isinstance(first, _OnHost):
        with torch_memory.on_host():
            whole = _cat([value.tensor for value in values])
        return place(whole, first.device)
    if any(type(value) is not type(first) for value in values):
        raise ValueError(_OTHERWISE)
    if isinstance(first, Mapping):
        depths = data()["outputs"]["listed"]
        named = {name: [value[name] for value in values] for name in first}
        return type(first)(
            **{name: _joined(each, place, depth=depths.get(name)) for name, each in named.items()}
        )
    if type(first) in (list, tuple):
        entries = list(itertools.chain.from_iterable(values))
        if depth == 0 and all(isinstance(entry, _OnHost) for entry in entries):
            return type(first)(_joined([entry], place, depth=None) for entry in entries)
        if any(len(value) != len(first) for value in values):
            raise ValueError(_OTHERWISE)
        if depth is None:
            inner = None
        else:
            inner = max(0, depth - 1)
        layers = zip(*values, strict=True)
        return type(first)(_joined(list(layer), place, depth=inner) for layer in layers)
    if any(value != first for value in values):
        raise ValueError(_OTHERWISE)
    return first


def _cat(tensors: list[Any]) -> Any:
    import torch

    if len(tensors) > 1:
        return torch.cat(tensors)
    return tensors[0]


# Detection of texts in images, as OWL-ViT reads it: images are the rows, each with several texts.


def texts_of_images(model: Any, arguments: Mapping[str, Any]) -> tuple[Media, int, int] | None:
    """Return the media, the images, and the texts per image; None for another model or call."""
    names = {base.__name__ for base in type(model).__mro__}
    found = None
    for kind in data()["texts_of_images"]:
        if names & set(kind["classes"]):
            found = kind
            break
    images: Any = None if found is None else arguments.get(found["images"])
    if found is None or not is_tensor(images) or not images.ndim:
        return None
    texts = {}
    for name in found["texts"]:
        if arguments.get(name) is not None:
            texts[name] = arguments[name]
    sizes = set()
    for text in texts.values():
        if is_tensor(text) and text.ndim > 1:
            sizes.add(text.shape[0])
        else:
            sizes.add(None)
    rows = images.shape[0]
    size = next(iter(sizes), None)
    if len(sizes) != 1 or size is None or not rows or size % rows:
        return None
    starts = dict.fromkeys(texts, tuple(range(0, size + 1, size // rows)))
    return Media({**starts, found["images"]: tuple(range(rows + 1))}), rows, size // rows


_ITEMS: Final = "num_items_in_batch"
WHY_NOT_TRAINED: Final = "the call records gradients, or the model is in training mode"


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """A call of a model: its rows, and how to make a part of it.

    ``positional`` are the names of its positional arguments, from the model's signature. ``taken``
    are unlisted arguments that are split because they have one entry per row.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    positional: tuple[str, ...]
    rows: int
    prompt_tokens: int | None
    why_not_rows: str | None
    may_train: bool
    max_new_tokens: int | None = 0
    estimated_row_bytes: int | None = None
    waits_on_host: bool = False
    pad_value: int | None = None
    puts_back: Collection[str] = ()
    phase: str | None = None
    draws: list[Draws] = field(default_factory=list)
    chunk_tokens: int | None = None
    attention: str | None = None
    media: Media = field(default_factory=lambda: Media({}))
    taken: frozenset[str] = frozenset()
    texts: int = 1  # per row
    left: dict[int, list[tuple[Any, str, Any]]] = field(default_factory=dict)
    stored: Stored = field(default_factory=dict)
    layout: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ForwardCall:
        """Read a call; ``not_splittable`` says why it cannot be split, None if it can."""
        # The class's own method, because libraries replace the instance's with a wrapper.
        parameters = tuple(inspect.signature(type(model).forward).parameters)[1:]
        positional = parameters[: len(args)]
        arguments = {**dict(zip(positional, args, strict=False)), **kwargs}
        found = None
        for name in (*names("text"), *names("others")):
            if is_input(name, arguments.get(name)):
                found = name
                break
        trains = records_gradients(model, arguments.values())
        of_images = texts_of_images(model, arguments)
        rows = common_rows(arguments) if found is None else int(arguments[found].shape[0])
        texts = 1
        if rows is None:
            with_tensors = []
            for name, value in arguments.items():
                if any(tensors(value)):
                    with_tensors.append(name)
            given = ", ".join(with_tensors) or "no tensor"
            why = f"oomguard does not know which argument has one row per input: {given}"
            return cls(
                model, args, kwargs, positional, 1, None, f"{why}. {guard_advice({}, 0)}", trains
            )
        # A forward with *args has no names for them.
        if len(positional) == len(args):
            reason = None
        else:
            reason = "oomguard does not know the names of its positional arguments"
        media: Media | str = Media({})
        if of_images is not None:
            media, rows, texts = of_images
        elif found == "input_ids":
            media = media_of(model, arguments, arguments[found])
        if isinstance(media, str):
            of_rows = Media({})
        else:
            of_rows = media
        taken = (
            frozenset()
            if of_rows.starts
            else infer_row_arguments(arguments, rows, of_rows.unmarked)
        )
        if found in names("text"):
            tokens = int(arguments[found].shape[1])
        else:
            tokens = None
        reason = reason or why_rows_depend(model, "forward", arguments, rows, tokens)
        reason = reason or why_over_batch(model, arguments)
        if reason is None and isinstance(media, str):
            reason = f"{media}. {guard_advice(arguments, rows)}"
        reason = reason or why_not_rows(arguments, rows, of_rows, taken)
        return cls(
            model,
            args,
            kwargs,
            positional,
            rows,
            tokens,
            reason,
            trains,
            media=of_rows,
            taken=taken,
            texts=texts,
            layout=layout_of(model),
        )

    @property
    def not_splittable(self) -> str | None:
        """Why the call cannot be split into rows; None if it can."""
        return self.why_not_rows

    @property
    def several(self) -> Collection[int]:
        """Other numbers of entries per row in a result field: its texts, if there are several."""
        if self.texts == 1:
            return ()
        return (self.texts,)

    @property
    def weigh(self) -> Callable[[Any, int, int], float | None]:
        """The weight of a part's mean loss."""
        return self._weight

    @property
    def advice_for_one_row(self) -> str | None:
        """What to write if the logits of one long row do not fit; None if that cannot help."""
        given = {**dict(self._positional()), **self.kwargs}
        parameters = inspect.signature(type(self.model).forward).parameters
        if "logits_to_keep" not in parameters or given.get("logits_to_keep"):
            return None
        # The loss needs the logits of all positions.
        if given.get("labels") is not None:
            return None
        return (
            f"the call has one row, and keeps the logits of its {self.prompt_tokens} positions. If "
            "you need those of the last position only, pass logits_to_keep=1"
        )

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with rows ``start`` to ``stop``, with their padding."""
        given = {**dict(self._positional()), **self.kwargs}
        cut = {}
        for name, value in given.items():
            cut[name] = self._changed(name, value, lambda t: t[start:stop])
        cut.update(self.media.part(given, start, stop))
        args = tuple(cut[name] for name in self.positional)
        return args, {name: cut[name] for name in self.kwargs}

    @contextlib.contextmanager
    def around(self, start: int, stop: int) -> Iterator[None]:
        """Run a part as its variant, with the whole call's random numbers and model state."""
        together = join_row_state(self.model, self.left, start, self.rows - stop)
        if self.attention is not None or self.chunk_tokens is not None:
            together = self._another_way(self.model, together)
        # All rows at once draw as the user's call does, so nothing needs to be watched.
        if stop - start == self.rows:
            with together:
                yield
            return
        with self._drawing().of_rows(start, stop), together:
            yield

    def _drawing(self) -> Draws:
        """Return the random draws of all parts; the first part makes them."""
        from oomguard.engines.transformers.call_state import Draws, generator_states

        if not self.draws:
            self.draws.append(
                Draws(
                    generator_states(getattr(self.model, "device", None)), self.rows, may_draw=True
                )
            )
        return self.draws[0]

    @contextlib.contextmanager
    def _another_way(self, model: Any, around: AbstractContextManager[object]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.attention is not None:
                stack.enter_context(use_attention(model, self.attention))
            if self.chunk_tokens is not None:
                stack.enter_context(run_in_chunks(model, self.chunk_tokens))
            else:
                stack.enter_context(around)
            yield

    def varied(
        self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None
    ) -> ForwardCall | str:
        """Return the call with prefill chunks or other attention, or why that is impossible."""
        del failed_in
        given = {**dict(self._positional()), **self.kwargs}
        if self.may_train or self.model.training:
            why_not: str | None = WHY_NOT_TRAINED
        else:
            why_not = why_drawn(self.model)
        if why_not is None and given_cache(given) is not None:
            why_not = "the failed call's entries in the given cache cannot be removed"
        changed = self
        for name, value in changes.items():
            way = _WAYS.get(name)
            if way is None:
                found: ForwardCall | str = f"a plain call has no {name}"
            else:
                found = way(changed, given, value)
            found = why_not or found
            if isinstance(found, str):
                return found
            changed = found
        return changed

    def _in_chunks(self, given: Mapping[str, Any], tokens: FactValue) -> ForwardCall | str:
        """Return the call with chunks of ``tokens`` tokens, or why that changes the result."""
        why_not = why_not_in_chunks(self.model, given)
        if why_not is None and has_leading_padding(given.get("attention_mask")):
            why_not = "its rows begin with padding, whose outputs would change"
        if why_not is None and (self.prompt_tokens or 0) <= int(tokens):
            why_not = "its tokens already fit into one chunk"
        return why_not or replace(self, chunk_tokens=int(tokens))

    def _with_attention(
        self, given: Mapping[str, Any], implementation: FactValue
    ) -> ForwardCall | str:
        """Return the call with another attention implementation, or why that is impossible."""
        why_not = why_not_use_attention(self.model, given)
        if why_not is None and has_leading_padding(given.get("attention_mask")):
            why_not = "its rows begin with padding, whose outputs would change"
        return why_not or replace(self, attention=str(implementation))

    def problem(self, part: Any, rows: int) -> str | None:
        """Return why a part drew other random numbers than the whole call; None if it did not."""
        del part, rows
        if self.draws:
            return self.draws[0].problem
        return None

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return a part's result without its image outputs, which ``finished`` adds again."""
        is_whole = not self.media.outputs or stop - start == self.rows
        if is_whole:
            return result
        return store_image_fields(result, self.media.outputs, self.stored, start)

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the joined result with the image outputs of all rows."""
        if self.stored:
            return join_image_fields(result, self.stored, place)
        return result

    def _positional(self) -> Iterator[tuple[str, Any]]:
        return zip(self.positional, self.args, strict=True)

    def _changed(self, name: str, value: Any, change: Callable[[Any], Any]) -> Any:
        """Return an argument with each tensor of rows in it replaced by ``change(tensor)``."""
        if is_tensor(value):
            if name in self.taken or is_cut(name, value, self.rows):
                return change(value)
            return value
        if isinstance(value, Mapping) and any(True for _ in tensors(value)):
            return type(value)(
                **{key: self._changed(name, entry, change) for key, entry in value.items()}
            )
        if type(value) in (list, tuple) and any(True for _ in tensors(value)):
            return type(value)(self._changed(name, entry, change) for entry in value)
        return value

    def _weight(self, part: Any, start: int, stop: int) -> float | None:
        given = {**dict(self._positional()), **self.kwargs}
        labels = {}
        for name in LABELS:
            if given.get(name) is not None:
                labels[name] = given[name][start:stop]
        over = given.get(_ITEMS)
        if labels:
            return loss_weight(part, labels, None if over is None else float(over))
        return None


_WAYS: Final[
    Mapping[str, Callable[[ForwardCall, Mapping[str, Any], FactValue], ForwardCall | str]]
] = {
    "attn_implementation": ForwardCall._with_attention,
    "prefill_chunk_size": ForwardCall._in_chunks,
}


# A part's mean loss has a weight in the mean over all rows: its share of the counted labels.


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
    # A mean in half precision has only two or three digits.
    if loss.dtype in (torch.float32, torch.float64):
        tolerance = _TOLERANCE
    else:
        tolerance = _HALF_TOLERANCE
    shown_loss = loss.detach().double().cpu()
    means = list(_means(logits, labels))
    if over:
        for total, _ in means:
            mean = torch.tensor(total / over).double()
            if torch.isclose(shown_loss, mean, tolerance, 1e-7):
                return math.inf
    # By number of labels: the difference to their mean.
    found: dict[float, float] = {}
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
    tensors = []
    for entry in entries:
        if hasattr(entry, "untyped_storage"):
            tensors.append(entry)
    # A loss is a number, and comes first in every output of transformers.
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
        # Each position predicts the next one.
        if wanted.dim() == 2:
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
