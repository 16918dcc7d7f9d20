"""Whether the rows of a call depend on each other: its own model's code, followed under fake tensors before any part runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from oomguard.engines.transformers.call_kind import kind_followed
from oomguard.engines.transformers.kept_outside import ARGUMENT, KeptOutside
from oomguard.engines.transformers.loss import LABELS
from oomguard.engines.transformers.own_code import OWN_FUNCTION, is_library, is_own
from oomguard.engines.transformers.tensors import of_host
from oomguard.log import get_logger
from oomguard.memory.generate.result_layout import Layout

if TYPE_CHECKING:
    from oomguard.memory.generate.follow_rows import FollowedCall, Together, WithRows
    from oomguard.memory.generate.origin import Origin

# Steps of a generation that are followed: the prefill, and two that come after it.
_STEPS: Final = 3
# What was found to hold no value of all rows, by the model and the shape of the call.
_clean: Final[weakref.WeakKeyDictionary[Any, dict[Any, Together]]] = weakref.WeakKeyDictionary()
# Why the last call of a model could not be followed.
_failed: Final[weakref.WeakKeyDictionary[Any, str]] = weakref.WeakKeyDictionary()
# A loop over a tensor: what it does with each row is not followed.
_ONE_BY_ONE: Final = "unbind"
# What torch says where a program asks a fake tensor for its numbers, or for the different ones among them, or how many are alike.
_TAKES_VALUES: Final = (
    ".numpy() is not supported for tensor subclasses",
    "DataDependentOutputException",
    "Cannot access data pointer",
    "aten.unique",
    "aten._unique",
    "aten.bincount",
)
_lock: Final = threading.Lock()
_Run = Callable[[Any, Mapping[str, Any]], object]


@dataclass(frozen=True, slots=True)
class Followed:
    """A call to be followed.

    Attributes:
        model: the model.
        arguments: its arguments by name, with other tensors for those that hold rows.
        rows: how many it has.
        mask: its attention mask; None where it has none.
        around: entered around a call of the model that it is given.
        steps: tokens that it generates; None for a plain call of the model.
        pad: the token that stands for padding, where no mask tells it.
        lists: arguments that are lists with one tensor a row; they stand as one tensor in ``arguments``.
        layout: where it is noted at which axis the tensors of the result hold the rows; None where that is known.
        leaves: where the tensors are noted that a call leaves on its model, one entry a row.
        refuse_again: called with the reason where a call that is made once more finds something else than the first did.
        unlisted: what nothing but following the call tells of its arguments; None where their names do.
    """

    model: Any
    arguments: WithRows
    rows: int
    mask: Any
    around: Callable[[Any], AbstractContextManager[object]] = nullcontext
    steps: int | None = None
    pad: int | None = None
    lists: Mapping[str, Any] = field(default_factory=dict)
    layout: dict[str, tuple[int, int]] | None = None
    leaves: list[tuple[str, str]] = field(default_factory=list)
    refuse_again: Callable[[str], object] = lambda why: None
    unlisted: str | None = None

    def why_not_again(self) -> str | None:
        """Return what the call changes that it reads, None where nothing, or that cannot be told."""
        found: list[str] = []
        replace(self, refuse_again=found.append).why_together()
        return next(iter(found), None)

    def why_together(self) -> str | None:
        """Return what makes a row depend on those beside it; None where nothing does, or the model cannot be followed."""
        if self.rows <= 1:
            return None
        key = kind_followed(self.model, self.arguments, self.steps)
        with _lock:
            known = _clean.get(self.model, {}).get(key)
            if known is not None:
                _failed.pop(self.model, None)
        if known is not None:
            return self._told(known)
        found, changes, taken = self._followed_apart()
        if changes is not None:
            why = (
                f"the model writes to {changes}: the call that failed has done so already"
                if changes.startswith(ARGUMENT)
                else f"the model's code changes {changes}, which is kept outside of it: each part would change it once more"
            )
            self.refuse_again(why)
            return why
        if found is None:
            unlisted = (
                self.unlisted
                and f"{self.unlisted}, and the model's code cannot be followed to tell: {why_not_followed(self.model)}"
            )
            return unlisted if taken is None else _taken(taken)
        if found.origin is not None:
            if found.left.why_not is not None:
                self.refuse_again(found.left.why_not)
            return _why_not_apart(found.origin)
        if not found.by_values:
            with _lock:
                _clean.setdefault(self.model, {})[key] = found
        return self._told(found)

    def _followed_apart(self) -> tuple[Together | None, str | None, str | None]:
        """Return what following told, None where that failed; what the code keeps elsewhere and changed, which is put back.

        The third is the line at which following failed, where own code took the values of rows there.
        """
        import torch

        taken: str | None = None
        outside, noted = KeptOutside(self.model, self.arguments(lambda tensor: tensor)), list[str | None]()
        try:
            with torch.inference_mode(mode=False):
                found = self._followed(lambda run: _noting(run, outside, noted))
        except Exception as error:  # noqa: BLE001 - a model's own code under fake tensors: anything, and all means "not known"
            why = f"{type(error).__name__}: {error}"
            get_logger().debug("the rows of the call cannot be followed", error=why)
            found, taken = None, _takes_values(error)
            with _lock:
                _failed[self.model] = why.partition("\n")[0]
        else:
            with _lock:
                _failed.pop(self.model, None)
        changes = next((each for each in noted if each), None) or outside.changed()
        outside.put_back()
        return found, changes, taken

    def _told(self, found: Together) -> str | None:
        """Note what following told; return why the rows cannot be run apart for it, None where they can."""
        self.leaves[:] = found.left.of_rows
        if found.left.why_not is not None:
            self.refuse_again(found.left.why_not)
            return found.left.why_not
        return self._laid_out(found.layout)

    def _laid_out(self, layout: Layout) -> str | None:
        """Note where the rows are in the result; return what of it has none, None where all of it can be put together."""
        if self.layout is None:
            return None
        self.layout.update(layout.axes)
        for name, shape in layout.without.items():
            return f"{name} does not hold the rows along one of its axes: it has the shape {shape}"
        given = self.arguments(lambda tensor: tensor)
        if layout.numbers and not any(given.get(name) is not None for name in LABELS):
            return f"{layout.numbers[0]} is one number for all rows, and how to put several together is not known"
        return None

    def _followed(self, noting: Callable[[_Run], _Run]) -> Any:
        from oomguard.memory.generate.fake_generate import is_full
        from oomguard.memory.generate.follow_rows import FollowedCall, together

        run = _forward if self.steps is None else _generating(min(_STEPS, self.steps))
        if self.lists:
            run = _with_lists(run, self.lists)
        call = FollowedCall(
            self.model,
            self.arguments,
            self.rows,
            noting(run),
            mask_is_full=is_full(self.mask),
            around=self.around,
            is_library=is_library,
        )
        if self.steps is not None:  # what a library's layers keep is of one generation, and begins anew with the next
            call = replace(call, looks_at=is_own)
        call = self._with_mask(replace(call, values=_on_host(self.lists)))
        found = together(call)
        more = 0 if self.steps is None or self.model.config.is_encoder_decoder else self.steps - _STEPS
        if found.origin is None and found.by_values and more > 0:
            # Values that follow from the length may come apart as rows grow.
            return together(replace(call, more_tokens=more))
        return found

    def _with_mask(self, call: FollowedCall) -> FollowedCall:
        """Return a generation with the mask that transformers makes where it finds padding and is given none."""
        ids = self.arguments(lambda tensor: tensor).get("input_ids")
        if self.steps is None or self.mask is not None or self.pad is None or ids is None or ids.dim() != 2:
            return call
        mask = of_host(lambda tokens: (tokens != self.pad).long(), ids)
        if of_host(lambda shown: bool(shown.all()), mask):
            return call
        made = self.arguments
        return replace(
            call,
            arguments=lambda change: {**made(change), "attention_mask": change(ids)},
            values={**call.values, "attention_mask": mask},
            mask_is_full=False,
        )


def _noting(run: _Run, outside: KeptOutside, noted: list[str | None]) -> _Run:
    """Return what runs a call, and notes what it has changed of its arguments, or outside while the copy of its model lives."""

    def noting(model: Any, arguments: Mapping[str, Any]) -> object:
        given = KeptOutside(None, arguments)
        try:
            return run(model, arguments)
        finally:
            noted.append(given.changed() or outside.changed())
            given.put_back()

    return noting


def _why_not_apart(origin: Origin) -> str:
    from oomguard.memory.generate.origin import NUMBER, PLACE, TAKEN

    if origin.operation == _ONE_BY_ONE:
        return f"its code goes over the rows one by one, and whether they are apart is not known: {origin.place}"
    if origin.operation == PLACE:
        where = f"in {origin.place}" if origin.line else f"in {origin.file}"
        return f"the place of a row in the batch decides what it gives: {where}"
    if origin.operation == NUMBER:
        return f"the number of rows decides what the model's code does: {origin.place}"
    if origin.operation == TAKEN:
        return _taken(origin.place)
    return f"a row depends on those beside it: the model takes {origin}"


def _taken(place: str) -> str:
    takes = "takes the values of rows out of torch, or counts those alike"
    return f"code of your own {takes}, and what it does with them cannot be followed: {place}. {OWN_FUNCTION}"


def _takes_values(error: Exception) -> str | None:
    """Return the line of own code that takes values which a fake tensor has not; None where following failed otherwise."""
    from oomguard.memory.generate.origin import own_place_of

    text = f"{type(error).__name__}: {error}"
    return own_place_of(error, is_library) if any(each in text for each in _TAKES_VALUES) else None


def why_not_followed(model: Any) -> str | None:
    """Return why the last call of a model could not be followed; None where it could, or none was."""
    with _lock:
        return _failed.get(model)


def _on_host(lists: Mapping[str, Any]) -> dict[str, Any]:
    """Return lists of tensors as one tensor each, which takes no memory of the device."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return {name: torch.stack([tensor.detach().cpu() for tensor in value]) for name, value in lists.items()}


def _with_lists(
    run: Callable[[Any, Mapping[str, Any]], object], lists: Mapping[str, Any]
) -> Callable[[Any, Any], object]:
    """Return what runs a call whose arguments of these names are lists of rows."""

    def cut(model: Any, arguments: Mapping[str, Any]) -> object:
        rows = {name: type(value)(arguments[name].unbind(0)) for name, value in lists.items()}
        return run(model, {**arguments, **rows})

    return cut


def _forward(model: Any, arguments: Mapping[str, Any]) -> Any:
    return model(**arguments)


def _generating(steps: int) -> Callable[[Any, Mapping[str, Any]], object]:
    from oomguard.memory.generate.follow_rows import first_steps

    return lambda model, arguments: first_steps(model, arguments, steps)
