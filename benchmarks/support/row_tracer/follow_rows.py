"""A call of a model, run under fake tensors with a prime number of rows: what in it makes a row
depend on those beside it.

As fake_generate.py this imports torch, so only code that has it already may import it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import StoppingCriteria, StoppingCriteriaList

from oomguard.estimate.call.fake_generate import (
    _ONE_AT_A_TIME,
    FakeCopies,
    FakeMemory,
    FakeModel,
    _as_if_real,
    _EnoughError,
    _fake,
    _Watch,
    rows_like,
    twin_of,
)
from oomguard.probe.torch_memory import LiveStorages
from support.row_tracer.left_behind import Left, changed, held_by, is_to_be_asked_again, left_by
from support.row_tracer.origin import Origin
from support.row_tracer.result_layout import Layout, layout_of
from support.row_tracer.rows_together import RowsTogether

# Returns the arguments of a call, with what a function makes of each tensor in them that holds
# rows.
WithRows = Callable[[Callable[[Any], Any]], dict[str, Any]]
# More rows than these are not followed: those with the largest and the smallest values stand for
# the others.
_MOST_ROWS: Final = 257
_FEWEST_ROWS: Final = 13
# Sizes come with one more or less, of a token that is put before the others.
_NEAR: Final = 2
# Arguments with more entries are followed without their values.
_MOST_ENTRIES: Final = 1 << 22
_MOST_STATE_ENTRIES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class FollowedCall:
    """A call whose rows are to be followed.

    Attributes:
        model: the model.
        arguments: its arguments by name, with other tensors for those that hold rows.
        rows: how many it has.
        run: runs it, on a copy of the model and fake arguments.
        mask_is_full: whether the attention mask hides nothing.
        values: the values of arguments that have others than their tensors, on the host, by name.
        looks_at: whether what a module keeps is looked at by anybody after the call.
    """

    model: Any
    arguments: WithRows
    rows: int
    run: Callable[[Any, Mapping[str, Any]], object]
    mask_is_full: bool
    values: Mapping[str, Any] = field(default_factory=dict)
    looks_at: Callable[[Any], bool] = lambda module: True


@dataclass(frozen=True, slots=True)
class Together:
    """What following the rows of a call told.

    ``origin`` is the first thing that makes a row depend on others, None where nothing does;
    ``by_values`` says that other values of the arguments may tell otherwise; ``layout`` is where
    the rows are in what it gives, ``left`` what it leaves beside that.
    """

    origin: Origin | None
    by_values: bool
    layout: Layout = field(default_factory=Layout)
    left: Left = field(default_factory=Left)


def together(call: FollowedCall) -> Together:
    """Return whether a row of a call depends on those beside it; raises whatever the model's code
    raises under fake tensors.
    """
    primes = _primes(call)
    first, by_values, traced = _mixing(call, next(primes))
    if first:
        # A size that the prime divides by chance tells of rows where there are none: another prime
        # does not divide it.
        again = {(origin.file, origin.line) for origin in _mixing(call, next(primes))[0]}
        first = [origin for origin in first if (origin.file, origin.line) in again]
    if (
        not first and traced.layout.without
    ):  # likewise of an axis of the result: as many steps of sound as rows
        traced = min(
            traced, _mixing(call, next(primes))[2], key=lambda one: len(one.layout.without)
        )
    return Together(first[0] if first else None, by_values, traced.layout, traced.left)


@dataclass(frozen=True, slots=True)
class _Traced:
    mode: RowsTogether
    rows: int
    layout: Layout
    left: Left


def _mixing(call: FollowedCall, rows: int) -> tuple[list[Origin], bool, _Traced]:
    traced = _followed(call, rows, answers_other=False)
    mode = traced.mode
    if mode.found or not mode.asked:
        return mode.found, mode.by_values, traced
    try:
        other = _followed(call, rows, answers_other=True)
    except Exception:  # noqa: BLE001 - the other answer leads elsewhere
        return mode.asked, True, traced
    if other.mode.stream == mode.stream:
        return ([], True, traced)
    return (mode.asked, True, traced)


def _followed(call: FollowedCall, rows: int, *, answers_other: bool) -> _Traced:
    twin = twin_of(call.model)
    order = _order(call, rows)

    def run(mode: RowsTogether) -> Any:
        return _run(call, twin, mode, rows, order)

    make = functools.partial(RowsTogether, rows, answers_other=answers_other)
    mode = make()
    before = held_by(twin.model, call.looks_at)
    result = run(mode)
    layout = layout_of(result, rows)
    mode.look_at_result(result)
    after = held_by(twin.model, call.looks_at)
    new = changed(before, after)
    if is_to_be_asked_again(new, mode.writes):
        run(make())
        return _Traced(
            mode,
            rows,
            layout,
            left_by(mode, new, rows, changed(after, held_by(twin.model, call.looks_at))),
        )
    return _Traced(mode, rows, layout, left_by(mode, new, rows, {}))


def _run(
    call: FollowedCall, twin: FakeModel, mode: RowsTogether, rows: int, order: Sequence[int]
) -> Any:
    """Run a call on a twin of its model, and return what it gives."""
    watch = _Watch(LiveStorages(), twin, mask_is_full=call.mask_is_full)
    with (
        _ONE_AT_A_TIME,
        _disable_current_modes(),
        twin.mode,
        _as_if_real(),
        warnings.catch_warnings(),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")
        made: list[tuple[Any, Any]] = []

        def fake_rows(tensor: Any) -> Any:
            made.append((rows_like(twin, tensor, rows), tensor))
            return made[-1][0]

        arguments = call.arguments(fake_rows)
        real = {id(fake): tensor for fake, tensor in made}
        for name, value in arguments.items():
            for leaf in tree_leaves(value):
                if id(leaf) in real:
                    mode.begin(leaf, name)
                    mode.keep(leaf, f"its argument {name}")
                    _give(mode, leaf, call.values.get(name, real[id(leaf)]), order)
        for (owner, ours), fakes in zip(
            call.model.named_modules(), twin.model.modules(), strict=True
        ):
            _give_state(mode, owner, ours, fakes)
        arguments = tree_map_only(
            torch.Tensor, lambda tensor: _constant(mode, twin.mode, tensor), arguments
        )
        # A script that is optimized while it runs gives other operations the second time.
        with torch.jit.optimized_execution(False), watch, FakeCopies(), FakeMemory(), mode:
            return call.run(twin.model, arguments)


def _give(mode: RowsTogether, fake: Any, tensor: Any, order: Sequence[int]) -> None:
    """Note what an argument holds."""
    if fake.numel() > _MOST_ENTRIES or not fake.numel() or tensor.is_meta:
        return
    with _disable_current_modes():
        whole = _on_host(tensor)[list(order)]
        mode.values.give(fake, whole)


def _give_state(mode: RowsTogether, owner: str, module: Any, fakes: Any) -> None:
    """Note what a module keeps beside its weights: a model may ask what an earlier call left there
    (the longest row so far).
    """
    kept = {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
        **vars(module),
    }
    for name, value in kept.items():
        if isinstance(value, torch.Tensor):
            fake = getattr(fakes, name, None)
        else:
            fake = None
        if isinstance(fake, FakeTensor):
            mode.name(
                fake
            )  # two ways that differ in what they read of these alone are not the same
            mode.keep(fake, f"{owner}.{name}" if owner else name)
        if isinstance(value, torch.nn.Parameter):
            continue
        if (
            isinstance(fake, FakeTensor)
            and value.numel() <= _MOST_STATE_ENTRIES
            and not value.is_meta
        ):
            with _disable_current_modes():
                mode.values.give(fake, _on_host(value).clone())


def _constant(mode: RowsTogether, fakes: Any, tensor: Any) -> Any:
    fake = _fake(fakes, tensor)
    if fake is not tensor and tensor.numel() <= _MOST_ENTRIES and not tensor.is_meta:
        with _disable_current_modes():
            mode.values.give(fake, _on_host(tensor).clone())
    return fake


def _on_host(tensor: Any) -> Any:
    return tensor.detach().to("cpu")


def _order(call: FollowedCall, rows: int) -> list[int]:
    """Return which row stands in each place: all of them, over again; of very many those with the
    largest and smallest values.
    """
    if rows >= call.rows:
        return [number % call.rows for number in range(rows)]
    chosen: dict[int, None] = {}
    tensors: list[Any] = []
    call.arguments(lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    for tensor in tensors:
        with _disable_current_modes():
            flat = _on_host(tensor).reshape(call.rows, -1)
            if flat.numel() and not flat.is_complex():
                flat = flat.float()
                for told in (flat.sum(1), flat.amax(1), flat.amin(1), (flat != 0).sum(1)):
                    chosen.update({int(told.argmax()): None, int(told.argmin()): None})
    chosen.update(dict.fromkeys(range(call.rows)))
    return list(chosen)[:rows]


def _primes(call: FollowedCall) -> Iterator[int]:
    """Yield numbers of rows that divide no size of the model and of the arguments, nor
    one near it.
    """
    sizes = {
        size
        for tensor in (*call.model.parameters(), *call.model.buffers())
        for size in tensor.shape
    }
    tensors: list[Any] = []
    call.arguments(lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    sizes |= {size for tensor in tensors for size in tensor.shape[1:]}
    near = {size + step for size in sizes for step in range(-_NEAR, _NEAR + 1)} - {0}
    for number in count(max(_FEWEST_ROWS, min(call.rows, _MOST_ROWS))):
        if all(number % factor for factor in range(2, int(number**0.5) + 1)) and all(
            size % number for size in near
        ):
            yield number


def first_steps(model: Any, arguments: Mapping[str, Any], steps: int) -> None:
    """Run the first steps of a generation."""
    with contextlib.suppress(_EnoughError):
        _generate_of(model, arguments)(
            **arguments, stopping_criteria=StoppingCriteriaList([_Ends(steps)])
        )


def _generate_of(model: Any, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the model's ``generate`` that takes these arguments: one that overrides it may take
    others, and call it with these.
    """
    own = [
        vars(kind)["generate"].__get__(model)
        for kind in type(model).__mro__
        if "generate" in vars(kind)
    ]
    methods: list[Callable[..., Any]] = [model.generate, *own]
    for method in methods:
        with contextlib.suppress(TypeError):
            inspect.signature(method).bind(**arguments, stopping_criteria=None)
            return method
    return methods[0]


class _Ends(StoppingCriteria):  # type: ignore[misc]
    """Ends a generation after some steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self._left -= 1
        if not self._left:
            raise _EnoughError
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
