"""Remember the batch sizes that worked under a guard; later calls begin with them."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from oomguard.core.facts import FactValue
from oomguard.core.log import get_logger
from oomguard.engines.protocol import KilledBefore, Shelf, WatchedCall
from oomguard.engines.registry import killed_before, shelf
from oomguard.remedy.policy import Policy

# A kill leaves no measurement, so the batch of a function whose process was killed is halved.


_BATCH: Final = "batch_size"


class KillRecovery:
    """The effect of an earlier kill on one guarded function; true if there was a kill.

    Args:
        name: the function's name.
        policy: what the user permits.
    """

    def __init__(self, name: str, policy: Policy) -> None:
        self._name = name
        self._policy = policy

    def __bool__(self) -> bool:
        return killed_before() is not None

    def rows(self, call: WatchedCall, rows: int) -> int:
        """Return how many rows of a call to begin with, and log the reduction once.

        ``rows`` is their number without a kill.
        """
        killed = killed_before()
        if killed is None:
            return rows
        why = call.not_splittable or (
            "batch_size is pinned" if _BATCH in self._policy.pinned else None
        )
        least = self._policy.minimum.get(_BATCH, 1)
        if why is not None:
            fewer = rows
        else:
            fewer = max(int(least), rows >> killed.times, 1)
        if fewer < rows:
            _log(self._name, killed, f"{rows} -> {fewer}")
            return fewer
        _log(
            self._name,
            killed,
            None,
            why or "no fewer rows are permitted" if rows > 1 else "it has one row",
        )
        return rows

    def log_unchanged(self) -> None:
        """Log once that a function without batch arguments runs again unchanged."""
        killed = killed_before()
        if killed is not None:
            _log(self._name, killed, None, "guard(batch=...) names the argument to split")


# The cache makes each message appear only once in a process.
@functools.lru_cache(maxsize=64)
def _log(name: str, killed: KilledBefore, rows: str | None, why: str | None = None) -> None:
    fields = {"function": name, "killed_by": killed.by, "times": killed.times}
    if rows is not None:
        get_logger().warning(
            "run again after a kill for memory, with fewer rows", **fields, rows=rows
        )
    else:
        get_logger().warning("run again after a kill for memory, as it was", **fields, why=why)


# Later rows may need more than the measured ones.
_MARGIN_RATIO: Final = 0.02
# A measurement of a few rows says little about many.
_MOST_GROWTH: Final = 8
# A prompt shorter than half of one that needed chunks is first tried without chunks.
_CHUNKED_FROM: Final = 2
# If memory cannot be measured: after so many calls in a row that fit, twice the rows are tried.
_FIRST_PATIENCE_CALLS: Final = 8
# Rows of: kind of call, model, rows, tokens, bytes per row, changed settings.
Learned = Sequence[Sequence[Any]]


@dataclass(slots=True)
class _Known:
    rows: int
    tokens: int | None
    row_bytes: float | None
    model: weakref.ref[Any] | None
    calm_calls: int = 0
    patience_calls: int = _FIRST_PATIENCE_CALLS
    is_trying_more: bool = False
    varied: Mapping[str, FactValue] = field(default_factory=dict)


class BatchSizeCache:
    """The batch sizes of calls by kind and model; empty until a call was split.

    A process can pass what it learned to another one (``learned``, ``take``). There a model is
    known by its class and its name.
    """

    def __init__(self) -> None:
        self._by_call: dict[tuple[str, int], _Known] = {}
        self._taken: dict[tuple[str, str], _Known] = {}
        self._lock = threading.Lock()
        self.on_learned: Callable[[Learned], object] | None = None
        # For a function that may run again after a kill.
        self.after_kill: KillRecovery | None = None

    def __bool__(self) -> bool:
        return bool(self._by_call or self._taken or self.after_kill)

    def learned(self) -> Learned:
        """Return the sizes that another process can use, as plain values."""
        found = []
        for key, one in self._by_call.items():
            found.append((key[0], _words(one.model and one.model()), one))
        found += [(call, model, one) for (call, model), one in self._taken.items()]
        rows = {}
        # In reverse, this process's own sizes replace those that it took from another one.
        for call, model, one in reversed(found):
            if model is not None:
                rows[(call, model)] = one
        table = []
        for (call, model), one in rows.items():
            table.append([call, model, one.rows, one.tokens, one.row_bytes, dict(one.varied)])
        return table

    def take(self, learned: Learned) -> None:
        """Use another process's sizes; those of this process have precedence."""
        for call, model, rows, tokens, row_bytes, varied in learned:
            self._taken[call, model] = _Known(rows, tokens, row_bytes, None, varied=varied)

    def begin(self, call: WatchedCall, free_bytes: int | None) -> int:
        """Return how many rows of a call to begin with.

        These are all rows, unless an earlier call or kill requires fewer.

        Args:
            call: the call to run.
            free_bytes: the free memory of its device; None if unknown.
        """
        rows = self._known_rows(call, free_bytes)
        if call.model is None and self.after_kill:
            return self.after_kill.rows(call, rows)
        return rows

    def _known_rows(self, call: WatchedCall, free_bytes: int | None) -> int:
        known = self._known(call)
        if known is None or call.not_splittable is not None:
            return call.rows
        tokens = _tokens(call)
        if tokens and known.tokens:
            longer = tokens / known.tokens
        else:
            longer = 1.0
        # A row's bytes grow at least in proportion to its tokens, and at most (eager attention)
        # with their square.
        if longer <= 1:
            heavier = longer
        else:
            heavier = longer**2
        size = int(known.rows / heavier)
        if known.row_bytes and free_bytes is not None:
            size = min(
                _MOST_GROWTH * size,
                int(free_bytes * (1 - _MARGIN_RATIO) / (known.row_bytes * heavier)),
            )
        elif free_bytes is None and known.calm_calls >= known.patience_calls:
            known.is_trying_more = True
            size *= 2
        return min(call.rows, max(1, size))

    def varied(self, call: WatchedCall) -> Mapping[str, FactValue]:
        """Return settings to change from the start; empty unless an equally long call did."""
        known = self._known(call)
        tokens = _tokens(call)
        if (
            known is None
            or known.tokens is None
            or tokens is None
            or tokens * _CHUNKED_FROM < known.tokens
        ):
            return {}
        return known.varied

    def ran(
        self,
        call: WatchedCall,
        rows: int,
        row_bytes: float | None,
        *,
        after_failure: bool,
        varied: Mapping[str, FactValue],
    ) -> None:
        """Record that parts of ``rows`` rows ran, with at most ``row_bytes`` per row.

        After a failure this replaces the known size.
        """
        known = self._known(call)
        after_failure = after_failure or (
            rows < call.rows and call.model is None and bool(self.after_kill)
        )
        if known is None and not after_failure:
            return
        self._keep(call, known, rows, row_bytes, after_failure=after_failure, varied=varied)
        if after_failure and self.on_learned is not None:
            self.on_learned(self.learned())

    def _keep(
        self,
        call: WatchedCall,
        known: _Known | None,
        rows: int,
        row_bytes: float | None,
        *,
        after_failure: bool,
        varied: Mapping[str, FactValue],
    ) -> None:
        with self._lock:
            if known is None or after_failure:
                # The larger size failed, so the next try waits for twice as many calls.
                if known is not None and known.is_trying_more:
                    again = known.patience_calls * 2
                else:
                    again = _FIRST_PATIENCE_CALLS
                if known is not None:
                    row_bytes = row_bytes or known.row_bytes
                if call.model is None:
                    model = None
                # A strong reference would keep a model that the program has dropped.
                else:
                    model = weakref.ref(call.model)
                self._by_call[_key(call)] = _Known(
                    rows, _tokens(call), row_bytes, model, patience_calls=again, varied=varied
                )
            else:
                if known.is_trying_more:
                    known.calm_calls = 0
                else:
                    known.calm_calls = known.calm_calls + 1
                known.is_trying_more = False
                tokens = _tokens(call)
                # A loop without a cache makes ever longer calls, so each measures for the next one.
                is_longer = row_bytes is not None and (tokens or 0) > (known.tokens or 0)
                if rows > known.rows or is_longer:
                    known.rows = rows
                    known.tokens = tokens
                    known.row_bytes = row_bytes or known.row_bytes

    def forget(self, call: WatchedCall) -> None:
        """Forget the sizes for such calls: a part could not be run or joined."""
        with self._lock:
            self._by_call.pop(_key(call), None)
            self._taken.pop((type(call).__name__, _words(call.model) or ""), None)

    def _known(self, call: WatchedCall) -> _Known | None:
        known = self._by_call.get(_key(call))
        # Python may give the id of a model that is gone to another one.
        if known is not None and (known.model is None or known.model() is call.model):
            return known
        if not self._taken or (model := _words(call.model)) is None:
            return None
        return self._taken.get((type(call).__name__, model))


def _key(call: WatchedCall) -> tuple[str, int]:
    return type(call).__name__, id(call.model)


def _words(model: Any) -> str | None:
    """Return the class and name by which another process knows a model too.

    "" means no model; None means that the model has no name.
    """
    if model is None:
        return ""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    if isinstance(name, str) and name:
        return f"{type(model).__name__} {name}"
    return None


def _tokens(call: WatchedCall) -> int | None:
    """Return the tokens of a row, prompt and answer; None if unknown."""
    if call.prompt_tokens is None or call.max_new_tokens is None:
        return None
    return max(1, call.prompt_tokens + call.max_new_tokens)


# Processes of one job share what they learned of a function.

# Any process of the job writes the store, so a huge text in it must not delay the first call.
_MOST_CHARS: Final = 65_536
_SHAPES: Final = ((str,), (str,), (int,), (int, type(None)), (int, float, type(None)), (dict,))


def share(name: str, known: BatchSizeCache) -> None:
    """Use what other processes learned of a function, and share what this one learns.

    Nothing happens without a shared store. Its contents are not trusted: a text of another form is
    ignored. No error of the store reaches a call.
    """
    with contextlib.suppress(Exception):
        if (found := shelf()) is not None:
            known.take(_read(found.read(name)))
            known.on_learned = lambda learned: _write(found, name, learned)


def _write(on: Shelf, name: str, learned: Learned) -> None:
    with contextlib.suppress(Exception):
        # Another process may write at the same time, and its value is just as good.
        on.write(name, json.dumps(learned))


def _read(text: str | None) -> list[Any]:
    if text is None or len(text) > _MOST_CHARS:
        return []
    rows = json.loads(text)
    if not isinstance(rows, list):
        return []
    # Another version of oomguard may have written other rows, which are dropped one by one.
    return list(filter(_is_row, rows))


def _is_row(row: object) -> bool:
    if not isinstance(row, list) or len(row) != len(_SHAPES):
        return False
    for value, kinds in zip(row, _SHAPES, strict=True):
        # A bool is an int in Python, but never a size.
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
    rows: int = row[2]
    return rows > 0
