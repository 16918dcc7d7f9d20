"""A plain function that works on rows: called on a part of the arguments that the user names."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from oomguard.core.facts import FactValue
from oomguard.guarding.inputs import AsHandedIn, Filled
from oomguard.guarding.rows import cut, entries, is_record, rows_of, why_not_cut, why_not_rows
from oomguard.probe import torch_memory

# How a method names the object it is called on, which holds no rows of the call.
_OWNERS: Final = frozenset({"self", "cls"})
_SEVERAL: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class RowsCall:
    """One call of a function whose arguments ``names`` hold one entry per row, each in the same
    order.

    ``handed_in`` is what its containers held before it, ``filled`` what its parts do to theirs;
    ``records`` says of the first part's result whether it is a record of fields, which later ones
    are then too; ``told`` that the user knows of random numbers in it.
    """

    bound: inspect.BoundArguments
    names: tuple[str, ...]
    rows: int
    reason: str | None
    handed_in: AsHandedIn = field(default_factory=AsHandedIn)
    model: Any = None
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    estimated_row_bytes: int | None = None
    waits_on_host: bool = False
    pad_value: int | None = None
    puts_back: Collection[str] = ()
    may_train: bool = True
    phase: str | None = None
    weigh: None = None
    several: Collection[int] = ()
    layout: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    records: list[bool] = field(default_factory=list)
    told: list[bool] = field(default_factory=list)
    filled: Filled = field(default_factory=lambda: Filled(0))

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        names: Sequence[str],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        handed_in: AsHandedIn | None = None,
    ) -> RowsCall:
        """Read a call; raises TypeError where the arguments do not fit the function, as calling it
        would.
        """
        bound = inspect.signature(function).bind(*args, **kwargs)
        handed_in = handed_in or AsHandedIn(args, kwargs)
        handed_in.put_back(
            bound.arguments.get(name) for name in names
        )  # the call that failed may have begun to fill them
        sizes: dict[str, int] = {}
        for name in names:
            value: Any = bound.arguments.get(name)
            if (why := why_not_cut(name, value)) is not None:
                return cls(bound, tuple(names), max(1, rows_of(value)), why)
            sizes[name] = rows_of(value)
        rows = next(iter(sizes.values()))
        if rows == 0:
            return cls(bound, tuple(names), 1, f"the argument {names[0]} has no entries")
        reason = None
        if len(set(sizes.values())) > 1:
            named = [f"{name} {size}" for name, size in list(sizes.items())[1:]]
            reason = f"the argument {names[0]} has {rows} entries, {', '.join(named)}"
        reason = reason or _beside(bound, names, rows)
        return cls(bound, tuple(names), rows, reason, handed_in, filled=Filled(rows))

    @property
    def not_splittable(self) -> str | None:
        """Why its rows cannot be run apart; None where they can."""
        return self.reason or self.handed_in.why_changed(self.bound.arguments, self.names)

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of the whole call."""
        return self.bound.args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the whole call."""
        return self.bound.kwargs

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call on rows ``start`` to ``stop``."""
        arguments = dict(self.bound.arguments)
        self.handed_in.put_back(arguments[name] for name in self.names)
        given = {name: cut(arguments[name], start, stop) for name in self.names}
        self.filled.begin(start, given)
        arguments.update(given)
        part = inspect.BoundArguments(self.bound.signature, arguments)
        return part.args, part.kwargs

    @contextlib.contextmanager
    def around(self, start: int, stop: int) -> Iterator[None]:
        """Say once where the function draws random numbers: rows in parts draw others than they
        would together.
        """
        del start, stop
        if self.told:
            before = None
        else:
            before = _generator_state()
        yield
        if before is not None and before != _generator_state():
            from oomguard.core.log import get_logger

            self.told.append(True)
            hint = "seed each row by itself"
            get_logger().warning(
                "the function draws random numbers: other ones in parts than in one call", hint=hint
            )

    def varied(self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None) -> str:
        """Return why nothing of it is done another way."""
        del changes, failed_in
        return "the function is your own"

    def problem(self, part: Any, rows: int) -> str | None:
        """Return why the result of a part cannot be put together with others; None where it has one
        entry for each row.
        """
        if not self.records:
            self.records.append(is_record(part, rows))
        return why_not_rows(part, rows, is_known_record=self.records[0]) or self.filled.note(
            part, rows
        )

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return a result as it is: nothing was left out."""
        del start, stop
        return result

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the result as it is put together: the caller's own container where the function
        fills and returns the one it is handed.
        """
        del place
        return self.filled.done_to(self.bound.arguments, result)


def _beside(bound: inspect.BoundArguments, names: Sequence[str], rows: int) -> str | None:
    """Return why the arguments that are not named forbid a split; None where none of them can
    belong to single rows.
    """
    for name, value in _others(bound, names):
        if isinstance(value, Iterator):
            return f"the argument {name} is an iterator: what the first call took from it is gone"
        if rows > 1 and entries(value) == rows:
            together = ", ".join(f'"{each}"' for each in (*names, name))
            own = bound.signature.parameters.get(name)
            alone = own is not None and own.kind not in _SEVERAL
            if alone:
                advice = f"batch=({together})"
            else:
                advice = "each as an argument of its own"
            return (
                f"the argument {name} has {rows} entries too: name all that belongs to the rows, "
                f"{advice}"
            )
    return None


def _others(bound: inspect.BoundArguments, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments that are not named, those in ``*args``, ``**kwargs`` and mappings one by
    one.
    """
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if name in names or name in _OWNERS:
            continue
        if kind is inspect.Parameter.VAR_POSITIONAL:
            for entry in value:
                yield from _with_entries(name, entry)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            for key, entry in value.items():
                yield from _with_entries(key, entry)
        else:
            yield from _with_entries(name, value)


def _with_entries(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value, and the values in it where it is a mapping: tensors by name, options."""
    yield name, value
    if isinstance(value, Mapping):
        yield from ((f"{key} in {name}", entry) for key, entry in value.items())


def _generator_state() -> bytes | None:
    """Return where the CPU's generator stands, None where torch is not loaded; no tensor of it
    takes the device's memory.
    """
    if (torch := sys.modules.get("torch")) is None:
        return None
    with torch_memory.on_host():
        return bytes(torch.get_rng_state().numpy())
