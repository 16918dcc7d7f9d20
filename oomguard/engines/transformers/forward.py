"""A model's forward: the outermost call of it, run in parts that give the same rows in order."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from oomguard.engines.transformers.attention import attending, why_not_attending
from oomguard.engines.transformers.branch_on_rows import why_branches
from oomguard.engines.transformers.cache_argument import given_cache
from oomguard.engines.transformers.chunked_forward import begins_padded, chunking, why_not_in_chunks
from oomguard.engines.transformers.comparing import RowsCompared, compared
from oomguard.engines.transformers.forward_draws import WHY_NOT as WHY_NOT_DRAWN
from oomguard.engines.transformers.forward_draws import AlikeDraws, noting_draws, tell_of_draws
from oomguard.engines.transformers.forward_rows import is_cut, is_input, names, why_not_rows, why_over_batch
from oomguard.engines.transformers.independence import records_gradients, why_drawn, why_rows_depend
from oomguard.engines.transformers.left_on_model import put_together
from oomguard.engines.transformers.loss import LABELS, loss_weight
from oomguard.engines.transformers.media import Media, media_of
from oomguard.engines.transformers.media_outputs import Stored, put_back, taken_off
from oomguard.engines.transformers.own_function import with_own_function
from oomguard.engines.transformers.taken_rows import common_rows, taken_for_rows, why_unlisted
from oomguard.engines.transformers.tensors import is_tensor, tensors
from oomguard.engines.transformers.texts_of_images import texts_of_images
from oomguard.engines.transformers.traced_forward import TracedForward
from oomguard.facts import FactValue

_ITEMS: Final = "num_items_in_batch"
WHY_NOT_TRAINED: Final = "gradients are recorded, or the model is in training mode"


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """One call of a model: its rows, and how to make a part of it.

    ``positional`` are the names of its positional arguments, by the model's own signature; ``found`` is why parts of its results,
    as a trace shows them, cannot be put together, ``drawn`` why another call would find or draw something else, as a trace or a part shows;
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
    beside_row_bytes: int = 0
    waits_on_host: bool = False
    unsettled: None = None
    pad_value: int | None = None
    puts_back: Collection[str] = ()
    phase: str | None = None
    found: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    alike: AlikeDraws = field(default_factory=AlikeDraws)
    chunk_tokens: int | None = None
    attention: str | None = None
    media: Media = field(default_factory=lambda: Media({}))
    taken: frozenset[str] = frozenset()
    texts: int = 1  # of each row
    left: dict[int, list[tuple[Any, str, Any]]] = field(default_factory=dict)
    leaves: list[tuple[str, str]] = field(default_factory=list)
    stored: Stored = field(default_factory=dict)
    layout: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ForwardCall:
        """Read a call; ``not_splittable`` says why its rows cannot be run apart, None where they can."""
        parameters = tuple(inspect.signature(type(model).forward).parameters)[1:]
        positional = parameters[: len(args)]
        arguments = {**dict(zip(positional, args, strict=False)), **kwargs}
        found = next((name for name in (*names("text"), *names("others")) if is_input(name, arguments.get(name))), None)
        trains = records_gradients(model, arguments.values())
        of_images = texts_of_images(model, arguments)
        rows, texts = common_rows(arguments) if found is None else int(arguments[found].shape[0]), 1
        if rows is None:
            given = (
                ", ".join(name for name, value in arguments.items() if any(True for _ in tensors(value))) or "no tensor"
            )
            why = f"none of its arguments is known to hold one row per input: {given}"
            why = with_own_function(why, model, arguments)
            return cls(model, args, kwargs, positional, 1, None, why, trains)
        reason = None if len(positional) == len(args) else "its positional arguments have no names"
        media: Media | str = Media({})
        if of_images is not None:
            media, rows, texts = of_images
        elif found == "input_ids":
            media = media_of(model, arguments, arguments[found])
        of_rows = Media({}) if isinstance(media, str) else media
        taken = frozenset() if of_rows.starts else taken_for_rows(arguments, rows, of_rows.untold)
        reason = reason or why_rows_depend(model) or why_branches(model) or why_over_batch(model, arguments)
        reason = reason or (
            with_own_function(media, model, arguments, rows)
            if isinstance(media, str)
            else why_not_rows(model, arguments, rows, media, taken)
        )
        tokens = int(arguments[found].shape[1]) if found in names("text") else None
        return cls(
            model, args, kwargs, positional, rows, tokens, reason, trains, media=of_rows, taken=taken, texts=texts
        )

    @property
    def not_splittable(self) -> str | None:
        """Why its rows cannot be run apart, by the call or by what a trace of it found; None where they can."""
        return self.why_not_rows or next(iter((*self.found, *self.drawn)), None)

    @property
    def several(self) -> Collection[int]:
        """How many entries a row may have in a field beside one: its texts where it has several, else no other number."""
        return () if self.texts == 1 else (self.texts,)

    @property
    def weigh(self) -> Callable[[Any, int, int], float | None]:
        """What the mean loss of rows weighs."""
        return self._weight

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with rows ``start`` to ``stop``, padding columns included."""
        given = {**dict(self._positional()), **self.kwargs}
        cut = {name: self._changed(name, value, lambda t: t[start:stop]) for name, value in given.items()}
        cut.update(self.media.part(given, start, stop))
        return tuple(cut[name] for name in self.positional), {name: cut[name] for name in self.kwargs}

    def around(self, start: int, stop: int) -> AbstractContextManager[object]:
        """Return what has the model run another way, where it is to, and leave what the whole call leaves."""
        together = put_together(self.model, self.left, start, self.rows - stop, self.leaves)
        if self.chunk_tokens is None and self.attention is None:
            return self._noting_draws(together, is_whole=stop - start == self.rows)
        return self._noting_draws(self._another_way(self.model, together), is_whole=False)

    @contextlib.contextmanager
    def _noting_draws(self, around: AbstractContextManager[object], *, is_whole: bool) -> Iterator[None]:
        if is_whole:
            noted = noting_draws(self.model, tell_of_draws)
        elif self.alike.is_known:
            noted = self.alike.of_part(self.model, self.drawn.append)
        else:
            noted = noting_draws(self.model, self.drawn.append)
        with noted, around:
            yield

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

    def varied(self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None) -> ForwardCall | str:
        """Return the call over some tokens at a time, or with other attention; or why it gives another result so."""
        del failed_in
        given = {**dict(self._positional()), **self.kwargs}
        why_not = WHY_NOT_TRAINED if self.may_train or self.model.training else why_drawn(self.model)
        why_not = why_not or next(iter(self.drawn), None)
        if why_not is None and given_cache(given) is not None:
            why_not = "what the failed call left in the cache it was given cannot be taken back"
        changed = self
        for name, value in changes.items():
            way = _WAYS.get(name)
            found = why_not or (f"a plain call has no {name}" if way is None else way(changed, given, value))
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

    def _with_attention(self, given: Mapping[str, Any], implementation: FactValue) -> ForwardCall | str:
        """Return the call with attention by another implementation, or why it cannot be made so."""
        why_not = why_not_attending(self.model, given)
        if why_not is None and begins_padded(given.get("attention_mask")):
            why_not = "what the padding before a row says would change"
        return why_not or replace(self, attention=str(implementation))

    def problem(self, part: Any, rows: int) -> str | None:
        """Return what a trace found; every field of a part's result is looked at where it is put."""
        del part, rows
        return next(iter((*self.found, *self.drawn)), None)

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return a part's result without what belongs to images and to no row, which is put in again in the end."""
        is_whole = not self.media.outputs or stop - start == self.rows
        return result if is_whole else taken_off(result, self.media.outputs, self.stored, start)

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the result with what was made of the images of all rows in it."""
        return put_back(result, self.stored, place) if self.stored else result

    def traced(self) -> TracedForward | None:
        """Return the call, to be asked what other numbers of rows need; None where it cannot be split."""
        is_varied = self.chunk_tokens is not None or self.attention is not None
        if (self.why_not_rows is not None and not is_varied) or self.media.starts:
            return None
        given = {**dict(self._positional()), **self.kwargs}
        return TracedForward(
            self.model,
            self.rows,
            lambda change: {name: self._changed(name, value, change) for name, value in given.items()},
            given.get("attention_mask"),
            self.found.append if self.why_not_rows is None else lambda _: None,
            lambda model: self._another_way(model, contextlib.nullcontext()),
            self._draws,
            self.layout,
            self.leaves,
            self.drawn.append,
            why_unlisted(self.taken),
        )

    def comparison(self) -> RowsCompared | None:
        """Return what compares its rows with each other, where nothing else tells that they can be run apart."""
        if self.media.starts:
            return None
        given = {**dict(self._positional()), **self.kwargs}

        def run(order: Sequence[int]) -> Any:
            cut = {name: self._changed(name, value, lambda t: t[list(order)]) for name, value in given.items()}
            with self._another_way(self.model, contextlib.nullcontext()):
                return self.model(*(cut[name] for name in self.positional), **{name: cut[name] for name in self.kwargs})

        return compared(self.model, given, run, gives_result=True, unlisted=why_unlisted(self.taken))

    def _draws(self, alone: bool) -> None:
        if alone:
            self.alike.is_known = True
        else:
            self.drawn.append(WHY_NOT_DRAWN)

    def _positional(self) -> Iterator[tuple[str, Any]]:
        return zip(self.positional, self.args, strict=True)

    def _changed(self, name: str, value: Any, change: Callable[[Any], Any]) -> Any:
        """Return an argument with what ``change`` makes of each tensor in it that holds rows."""
        if is_tensor(value):
            return change(value) if name in self.taken or is_cut(name, value, self.rows) else value
        if isinstance(value, Mapping) and any(True for _ in tensors(value)):
            return type(value)(**{key: self._changed(name, entry, change) for key, entry in value.items()})
        if type(value) in (list, tuple) and any(True for _ in tensors(value)):
            return type(value)(self._changed(name, entry, change) for entry in value)
        return value

    def _weight(self, part: Any, start: int, stop: int) -> float | None:
        given = {**dict(self._positional()), **self.kwargs}
        labels = {name: given[name][start:stop] for name in LABELS if given.get(name) is not None}
        over = given.get(_ITEMS)
        return loss_weight(part, labels, None if over is None else float(over)) if labels else None


_WAYS: Final[Mapping[str, Callable[[ForwardCall, Mapping[str, Any], FactValue], ForwardCall | str]]] = {
    "attn_implementation": ForwardCall._with_attention,
    "prefill_chunk_size": ForwardCall._in_chunks,
}
