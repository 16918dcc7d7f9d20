"""Split a call of the user's function along the arguments that the user names."""

from __future__ import annotations

import contextlib
import inspect
import operator
import sys
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from oomguard.core.facts import FactValue
from oomguard.guarding.collate import (
    ResultBuffer,
    can_be_joined,
    cut,
    entries,
    is_columns,
    is_record,
    library,
    place_of,
    rows_of,
    why_not_cut,
    why_not_rows,
)
from oomguard.probe import torch_memory

# A function may change the containers that it gets: add a column to a dict, replace list entries.
# Such changes of the parts are applied to the caller's containers. The failed call may have begun
# with them, so its changes are undone before a part is cut.

# The key for all entries of a list.
_ENTRIES: Final = object()
_MISSING: Final = object()


class OriginalInputs:
    """The contents of a call's arguments before it: container entries and tensor versions.

    ``live_bytes`` are the bytes that were allocated before it; None without a device.
    """

    def __init__(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        self.live_bytes = torch_memory.live_bytes()
        given = (*args, *(kwargs or {}).values())
        self._held: list[tuple[Any, Any]] = []
        values = list(given)
        for value in given:
            if isinstance(value, (dict, UserDict, list)):
                held = _held(value)
                self._held.append((value, held))
                if isinstance(held, dict):
                    values += held.values()
        # A tensor is too large to copy, but torch counts the writes to it.
        self._written: list[tuple[Any, int]] = []
        for value in values:
            if hasattr(value, "_version"):
                self._written.append((value, _writes(value)))

    def put_back(self, values: Iterable[Any]) -> None:
        """Restore the contents of those values that are containers."""
        named = {id(value) for value in values}
        for container, held in self._held:
            if id(container) in named and not _is_same(_held(container), held):
                _fill(container, held)

    def why_changed(self, arguments: Mapping[str, Any], names: Sequence[str]) -> str | None:
        """Return a changed argument that cannot be restored for a part; None without one."""
        for name, value in arguments.items():
            if name in names and is_columns(value):
                columns = value.values()
            else:
                columns = ()
            for one in (value, *columns):
                if self._is_written(one):
                    return f"the call that failed has written to the tensor in the argument {name}"
            # Containers in `names` are restored before each part, so only the others matter.
            if name not in names and self._is_changed(value):
                return f"the call that failed has changed the argument {name}"
        return None

    def _is_written(self, value: Any) -> bool:
        for tensor, writes in self._written:
            if value is tensor and _writes(tensor) != writes:
                return True
        return False

    def _is_changed(self, value: Any) -> bool:
        for container, held in self._held:
            if value is container and not _is_same(_held(container), held):
                return True
        return False


@dataclass(slots=True)
class InputWriteback:
    """The changes that parts make to the containers that they get.

    Attributes:
        total: the rows of the whole call.
        parts: the present part's containers and their contents, by argument.
        columns: the buffers for the parts' new values, by argument and column.
        removed: the columns that the parts removed.
        returned: the argument that each part returned; "" if none did, None before the first.
        done: the rows whose changes are recorded.
    """

    total: int
    parts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    columns: dict[tuple[str, Any], ResultBuffer | None] = field(default_factory=dict)
    removed: set[tuple[str, Any]] = field(default_factory=set)
    returned: str | None = None
    start: int = 0
    done: int = 0

    def begin(self, start: int, given: Mapping[str, Any]) -> None:
        """Record what a part beginning with row ``start`` gets."""
        if start == 0:
            self.columns = {}
            self.removed = set()
            self.returned = None
            self.done = 0
        self.start = start
        self.parts = {name: (value, _held(value)) for name, value in given.items()}

    def note(self, result: Any, rows: int) -> str | None:
        """Record a part's changes; return why they cannot be applied to the caller's containers.

        None if they can.
        """
        # The part ran twice, because its result did not fit.
        if self.done > self.start:
            return None
        returned = self._name_of(result)
        first = self.returned is None
        if not first and returned != self.returned:
            return "it returns what it was handed for some rows and not for others"
        changed = set[tuple[str, Any]]()
        removed = set[tuple[str, Any]]()
        for name, (given, held) in self.parts.items():
            for key, value in _changes(given, held):
                if value is _MISSING:
                    removed.add((name, key))
                    continue
                changed.add((name, key))
                if entries(value) != rows or not (
                    isinstance(value, (list, tuple)) or can_be_joined(value)
                ):
                    return (
                        f"it changes the argument {name} in place, and {_words(key)} in it does "
                        "not have one entry per row"
                    )
                if first:
                    if name == returned:
                        own = None
                    else:
                        own = place_of(value, rows, self.total, None, is_parked=True)
                    self.columns[name, key] = own
                place = self.columns.get((name, key))
                if place is not None and (why := place.add(value)) is not None:
                    return f"it changes {_words(key)} of the argument {name} in place: {why}"
        if not first and (changed != self.columns.keys() or removed != self.removed):
            return "it changes different columns of its arguments in place for different rows"
        self.removed = removed
        self.returned = returned
        self.done = self.start + rows
        return None

    def _name_of(self, result: Any) -> str:
        """Return the argument that a part returned; "" if its result is another object."""
        for name, (given, _) in self.parts.items():
            if result is given:
                return name
        return ""

    def done_to(self, arguments: Mapping[str, Any], result: Any) -> Any:
        """Apply the parts' changes to the caller's containers, and return the result.

        It is one of the containers if each part returned its own.
        """
        for (name, key), place in self.columns.items():
            if place is not None:
                value = place.result()
            elif key is _ENTRIES:
                value = result
            else:
                value = result[key]
            _put(arguments[name], key, value)
        for name, key in self.removed:
            del arguments[name][key]
        if not self.returned:
            return result
        if _is_returned(arguments[self.returned]):
            return arguments[self.returned]
        return result


def _held(value: Any) -> Any:
    if isinstance(value, (dict, UserDict)):
        return dict(value)
    if isinstance(value, list):
        return list(value)
    if library(value) == "pandas" and hasattr(value, "columns"):
        return value.copy()
    return None


def _is_same(now: Any, before: Any) -> bool:
    """Return whether two containers have the identical entries."""
    if isinstance(now, dict):
        return list(now) == list(before) and all(now[key] is before[key] for key in now)
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _fill(container: Any, held: Any) -> None:
    if isinstance(container, list):
        container[:] = held
    else:
        container.clear()
        container.update(held)


def _changes(given: Any, held: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and values that a function added; a removed key has no value."""
    if isinstance(held, list):
        if not _is_same(given, held):
            yield _ENTRIES, given
    elif held is not None:
        is_dict = isinstance(held, dict)
        for key in given if is_dict else given.columns:
            before = held.get(key, _MISSING)
            if before is _MISSING or (
                given[key] is not before if is_dict else not given[key].equals(before)
            ):
                yield key, given[key]
        for key in held if is_dict else held.columns:
            if key not in given:
                yield key, _MISSING


def _put(container: Any, key: Any, value: Any) -> None:
    if key is _ENTRIES:
        container[:] = value
    elif library(container) == "pandas":
        # By position, because row labels may repeat.
        container[key] = value.array
    else:
        container[key] = value


def _is_returned(value: Any) -> bool:
    """Return whether a caller's object already has the parts' changes, as a shared slice does."""
    shares = hasattr(value, "untyped_storage") or (
        library(value) == "numpy" and hasattr(value, "setflags")
    )
    return shares or _held(value) is not None


def _words(key: Any) -> str:
    if key is _ENTRIES:
        return "the list"
    return repr(key)


def _writes(tensor: Any) -> int:
    """Return how often a tensor was written to; inference tensors do not count it."""
    try:
        return int(tensor._version)
    except RuntimeError:
        return 0


# The names of a method's object, which does not hold rows.
_OWNERS: Final = frozenset({"self", "cls"})
_SEVERAL: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class RowsCall:
    """A call of a function whose arguments ``names`` have one entry per row, in the same order.

    ``handed_in`` has the containers' contents before the call, and ``filled`` the parts' changes.
    ``records`` says whether the first part's result is a record, so later ones must be too.
    ``is_warned`` says that the user was warned of random numbers.
    """

    bound: inspect.BoundArguments
    names: tuple[str, ...]
    rows: int
    reason: str | None
    handed_in: OriginalInputs = field(default_factory=OriginalInputs)
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
    is_warned: list[bool] = field(default_factory=list)
    filled: InputWriteback = field(default_factory=lambda: InputWriteback(0))

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        names: Sequence[str],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        handed_in: OriginalInputs | None = None,
    ) -> RowsCall:
        """Read a call. Raises TypeError if the arguments do not fit the function."""
        bound = inspect.signature(function).bind(*args, **kwargs)
        handed_in = handed_in or OriginalInputs(args, kwargs)
        # The call that failed may have begun to fill them.
        handed_in.put_back(map(bound.arguments.get, names))
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
        return cls(bound, tuple(names), rows, reason, handed_in, filled=InputWriteback(rows))

    @property
    def not_splittable(self) -> str | None:
        """Why the call cannot be split into rows; None if it can."""
        return self.reason or self.handed_in.why_changed(self.bound.arguments, self.names)

    @property
    def live_before_bytes(self) -> int | None:
        """The bytes that were allocated before the call; None without a device."""
        return self.handed_in.live_bytes

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
        # The part before may have changed the containers that it got.
        self.handed_in.put_back(arguments[name] for name in self.names)
        given = {name: cut(arguments[name], start, stop) for name in self.names}
        self.filled.begin(start, given)
        arguments.update(given)
        part = inspect.BoundArguments(self.bound.signature, arguments)
        return part.args, part.kwargs

    @contextlib.contextmanager
    def around(self, start: int, stop: int) -> Iterator[None]:
        """Warn once if the function draws random numbers, which differ between parts and whole."""
        del start, stop
        # One warning is enough, so later parts need no copy of the state.
        if self.is_warned:
            before = None
        else:
            before = _generator_state()
        yield
        if before is not None and before != _generator_state():
            from oomguard.core.log import get_logger

            self.is_warned.append(True)
            hint = "seed each row separately"
            get_logger().warning(
                "the function draws random numbers, which differ when it runs in parts", hint=hint
            )

    def varied(self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None) -> str:
        """Return why the call has no variants."""
        del changes, failed_in
        return "the function is your own"

    def problem(self, part: Any, rows: int) -> str | None:
        """Return why a part's result cannot be joined; None if it has one entry per row."""
        # A tuple with as many fields as rows may be either, so the first part decides for all.
        if not self.records:
            self.records.append(is_record(part, rows))
        return why_not_rows(part, rows, is_known_record=self.records[0]) or self.filled.note(
            part, rows
        )

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return the result: no variant left anything out."""
        del start, stop
        return result

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the joined result, or the caller's container if the function returns that."""
        del place
        return self.filled.done_to(self.bound.arguments, result)


def _beside(bound: inspect.BoundArguments, names: Sequence[str], rows: int) -> str | None:
    """Return why the unnamed arguments forbid a split; None if none has one entry per row."""
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
                advice = "each as a separate argument"
            return (
                f"the argument {name} has {rows} entries too: name all arguments with rows, "
                f"{advice}"
            )
    return None


def _others(bound: inspect.BoundArguments, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the unnamed arguments, also those in ``*args``, ``**kwargs`` and mappings."""
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
    """Yield a value, and the values in it if it is a mapping (tensors by name, options)."""
    yield name, value
    if isinstance(value, Mapping):
        yield from ((f"{key} in {name}", entry) for key, entry in value.items())


def _generator_state() -> bytes | None:
    """Return the CPU generator's state, without device memory; None if torch is not loaded."""
    if (torch := sys.modules.get("torch")) is None:
        return None
    with torch_memory.on_host():
        return bytes(torch.get_rng_state().numpy())
