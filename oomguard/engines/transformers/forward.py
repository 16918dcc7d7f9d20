"""A model's forward: the outermost call of it, run in parts that give the same rows in order."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.facts import FactValue
from oomguard.engines.transformers.attention import attending, why_not_attending
from oomguard.engines.transformers.call_state import put_together
from oomguard.engines.transformers.chunked_forward import begins_padded, chunking, why_not_in_chunks
from oomguard.engines.transformers.independence import (
    common_rows,
    is_cut,
    is_input,
    layout_of,
    line_to_write,
    names,
    records_gradients,
    taken_for_rows,
    why_drawn,
    why_not_rows,
    why_over_batch,
    why_rows_depend,
)
from oomguard.engines.transformers.inputs import given_cache, is_tensor, tensors
from oomguard.engines.transformers.loss import LABELS, loss_weight
from oomguard.engines.transformers.media import Media, data, media_of
from oomguard.probe import torch_memory

if TYPE_CHECKING:
    from oomguard.engines.transformers.random_draws import Draws


# What a model gives of the images of all rows, one after the other: that of the parts is put side
# by side, as their images were cut.

# Of each part, by its first row: the fields of its result that belong to no row, on the host.
Stored = dict[int, Mapping[str, Any]]
_OTHERWISE: Final = "what parts give of their images differs in more than the images"


def taken_off(result: Any, names: tuple[str, ...], stored: Stored, start: int) -> Any:
    """Return a part's result without these fields, which are stored."""
    own = {
        name: result[name]
        for name in names
        if isinstance(result, Mapping) and result.get(name) is not None
    }
    if start == 0:
        stored.clear()
    stored[start] = {name: _changed(value, _OnHost) for name, value in own.items()}
    if own:
        return type(result)(**{name: value for name, value in result.items() if name not in own})
    return result


def put_back(result: Any, stored: Stored, place: Callable[[Any, Any], Any]) -> Any:
    """Return the result of all rows with the stored fields of its parts in it, each tensor where
    ``place`` puts it.

    Raises:
        ValueError: parts differ in more than their images.
    """
    parts = [stored[start] for start in sorted(stored)]
    fields = {
        name: [part[name] for part in parts if name in part]
        for name in dict.fromkeys(n for p in parts for n in p)
    }
    joined = {name: _joined(values, place, depth=None) for name, values in fields.items()}
    if joined:
        return type(result)(**{**result, **joined})
    return result


class _OnHost:
    """A tensor that waits on the host, and the device that it came from."""

    def __init__(self, tensor: Any) -> None:
        self.device = tensor.device
        self.tensor = torch_memory.to_host(tensor)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a record with what ``change`` makes of each tensor in it."""
    if hasattr(value, "untyped_storage"):
        return change(value)
    if isinstance(value, Mapping):
        return type(value)(**{name: _changed(entry, change) for name, entry in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_changed(entry, change) for entry in value)
    return value


def _joined(values: list[Any], place: Callable[[Any, Any], Any], *, depth: int | None) -> Any:
    """Return several parts' records as one, each tensor along its first axis.

    ``depth`` is how many lists are around the one that has an entry for each image; None: there is
    none.
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
        entries = [entry for value in values for entry in value]
        if depth == 0 and all(isinstance(entry, _OnHost) for entry in entries):
            return type(first)(_joined([entry], place, depth=None) for entry in entries)
        if any(len(value) != len(first) for value in values):
            raise ValueError(_OTHERWISE)
        if depth is None:
            inner = None
        else:
            inner = max(0, depth - 1)
        return type(first)(
            _joined(list(layer), place, depth=inner) for layer in zip(*values, strict=True)
        )
    if any(value != first for value in values):
        raise ValueError(_OTHERWISE)
    return first


def _cat(tensors: list[Any]) -> Any:
    import torch

    if len(tensors) > 1:
        return torch.cat(tensors)
    return tensors[0]


# Calls with several texts for each image, which are the rows: detection of what texts name, as
# OWL-ViT reads it.


def texts_of_images(model: Any, arguments: Mapping[str, Any]) -> tuple[Media, int, int] | None:
    """Return whose each text and image is, the images, and the texts of each; None of another model
    or call.
    """
    names = {base.__name__ for base in type(model).__mro__}
    found = next((kind for kind in data()["texts_of_images"] if names & set(kind["classes"])), None)
    images: Any = None if found is None else arguments.get(found["images"])
    if found is None or not is_tensor(images) or not images.ndim:
        return None
    texts = {name: arguments[name] for name in found["texts"] if arguments.get(name) is not None}
    sizes = {
        text.shape[0] if is_tensor(text) and text.ndim > 1 else None for text in texts.values()
    }
    rows = images.shape[0]
    size = next(iter(sizes), None)
    if len(sizes) != 1 or size is None or not rows or size % rows:
        return None
    starts = dict.fromkeys(texts, tuple(range(0, size + 1, size // rows)))
    return Media({**starts, found["images"]: tuple(range(rows + 1))}), rows, size // rows


_ITEMS: Final = "num_items_in_batch"
WHY_NOT_TRAINED: Final = "gradients are recorded, or the model is in training mode"


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """One call of a model: its rows, and how to make a part of it.

    ``positional`` are the names of its positional arguments, by the model's own signature;
    ``taken`` are arguments that nobody has listed, and are cut.
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
    texts: int = 1  # of each row
    left: dict[int, list[tuple[Any, str, Any]]] = field(default_factory=dict)
    stored: Stored = field(default_factory=dict)
    layout: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ForwardCall:
        """Read a call; ``not_splittable`` says why its rows cannot be run apart, None where they
        can.
        """
        parameters = tuple(inspect.signature(type(model).forward).parameters)[1:]
        positional = parameters[: len(args)]
        arguments = {**dict(zip(positional, args, strict=False)), **kwargs}
        found = next(
            (
                name
                for name in (*names("text"), *names("others"))
                if is_input(name, arguments.get(name))
            ),
            None,
        )
        trains = records_gradients(model, arguments.values())
        of_images = texts_of_images(model, arguments)
        rows = common_rows(arguments) if found is None else int(arguments[found].shape[0])
        texts = 1
        if rows is None:
            given = (
                ", ".join(
                    name for name, value in arguments.items() if any(True for _ in tensors(value))
                )
                or "no tensor"
            )
            why = f"none of its arguments is known to hold one row per input: {given}"
            return cls(
                model, args, kwargs, positional, 1, None, f"{why}. {line_to_write({}, 0)}", trains
            )
        if len(positional) == len(args):
            reason = None
        else:
            reason = "its positional arguments have no names"
        media: Media | str = Media({})
        if of_images is not None:
            media, rows, texts = of_images
        elif found == "input_ids":
            media = media_of(model, arguments, arguments[found])
        if isinstance(media, str):
            of_rows = Media({})
        else:
            of_rows = media
        taken = frozenset() if of_rows.starts else taken_for_rows(arguments, rows, of_rows.untold)
        if found in names("text"):
            tokens = int(arguments[found].shape[1])
        else:
            tokens = None
        reason = reason or why_rows_depend(model, "forward", arguments, rows, tokens)
        reason = reason or why_over_batch(model, arguments)
        if reason is None and isinstance(media, str):
            reason = f"{media}. {line_to_write(arguments, rows)}"
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
        """Why its rows cannot be run apart; None where they can."""
        return self.why_not_rows

    @property
    def several(self) -> Collection[int]:
        """How many entries a row may have in a field beside one: its texts where it has several,
        else no other number.
        """
        if self.texts == 1:
            return ()
        return (self.texts,)

    @property
    def weigh(self) -> Callable[[Any, int, int], float | None]:
        """What the mean loss of rows weighs."""
        return self._weight

    @property
    def advice_for_one_row(self) -> str | None:
        """What to write if the logits of one long row do not fit; None if that cannot help."""
        given = {**dict(self._positional()), **self.kwargs}
        parameters = inspect.signature(type(self.model).forward).parameters
        if "logits_to_keep" not in parameters or given.get("logits_to_keep"):
            return None
        if given.get("labels") is not None:
            return None
        return (
            f"the call has one row, and keeps the logits of its {self.prompt_tokens} positions. If "
            "you need those of the last position only, pass logits_to_keep=1"
        )

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with rows ``start`` to ``stop``, padding columns included."""
        given = {**dict(self._positional()), **self.kwargs}
        cut = {
            name: self._changed(name, value, lambda t: t[start:stop])
            for name, value in given.items()
        }
        cut.update(self.media.part(given, start, stop))
        return tuple(cut[name] for name in self.positional), {
            name: cut[name] for name in self.kwargs
        }

    @contextlib.contextmanager
    def around(self, start: int, stop: int) -> Iterator[None]:
        """Run a part the other way that is asked for, draw what the whole call draws, and leave
        what the whole call leaves.
        """
        together = put_together(self.model, self.left, start, self.rows - stop)
        if self.attention is not None or self.chunk_tokens is not None:
            together = self._another_way(self.model, together)
        if stop - start == self.rows:
            with together:
                yield
            return
        with self._drawing().of_rows(start, stop), together:
            yield

    def _drawing(self) -> Draws:
        """Return what the parts draw, made with the first part."""
        from oomguard.engines.transformers.random_draws import Draws, states_now

        if not self.draws:
            self.draws.append(
                Draws(states_now(getattr(self.model, "device", None)), self.rows, may_draw=True)
            )
        return self.draws[0]

    @contextlib.contextmanager
    def _another_way(self, model: Any, around: AbstractContextManager[object]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.attention is not None:
                stack.enter_context(attending(model, self.attention))
            if self.chunk_tokens is not None:
                stack.enter_context(chunking(model, self.chunk_tokens))
            else:
                stack.enter_context(around)
            yield

    def varied(
        self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None
    ) -> ForwardCall | str:
        """Return the call over some tokens at a time, or with other attention; or why it gives
        another result so.
        """
        del failed_in
        given = {**dict(self._positional()), **self.kwargs}
        why_not = (
            WHY_NOT_TRAINED if self.may_train or self.model.training else why_drawn(self.model)
        )
        if why_not is None and given_cache(given) is not None:
            why_not = "what the failed call left in the cache it was given cannot be taken back"
        changed = self
        for name, value in changes.items():
            way = _WAYS.get(name)
            found = why_not or (
                f"a plain call has no {name}" if way is None else way(changed, given, value)
            )
            if isinstance(found, str):
                return found
            changed = found
        return changed

    def _in_chunks(self, given: Mapping[str, Any], tokens: FactValue) -> ForwardCall | str:
        """Return the call over ``tokens`` tokens at a time, or why it gives another result so."""
        why_not = why_not_in_chunks(self.model, given)
        if why_not is None and begins_padded(given.get("attention_mask")):
            why_not = "what the padding before a row says would change"
        if why_not is None and (self.prompt_tokens or 0) <= int(tokens):
            why_not = "its tokens are no more than a chunk"
        return why_not or replace(self, chunk_tokens=int(tokens))

    def _with_attention(
        self, given: Mapping[str, Any], implementation: FactValue
    ) -> ForwardCall | str:
        """Return the call with attention by another implementation, or why it cannot be made so."""
        why_not = why_not_attending(self.model, given)
        if why_not is None and begins_padded(given.get("attention_mask")):
            why_not = "what the padding before a row says would change"
        return why_not or replace(self, attention=str(implementation))

    def problem(self, part: Any, rows: int) -> str | None:
        """Return why a part drew other numbers than the whole call; every field of its result is
        looked at where it is put.
        """
        del part, rows
        if self.draws:
            return self.draws[0].problem
        return None

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return a part's result without what belongs to images and to no row, which is put in
        again in the end.
        """
        is_whole = not self.media.outputs or stop - start == self.rows
        if is_whole:
            return result
        return taken_off(result, self.media.outputs, self.stored, start)

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the result with what was made of the images of all rows in it."""
        if self.stored:
            return put_back(result, self.stored, place)
        return result

    def _positional(self) -> Iterator[tuple[str, Any]]:
        return zip(self.positional, self.args, strict=True)

    def _changed(self, name: str, value: Any, change: Callable[[Any], Any]) -> Any:
        """Return an argument with what ``change`` makes of each tensor in it that holds rows."""
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
        labels = {name: given[name][start:stop] for name in LABELS if given.get(name) is not None}
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
