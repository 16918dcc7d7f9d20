"""A span of the user's own: a block or a function that has a row in a watch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from oomguard.errors import UsageError

if TYPE_CHECKING:
    from oomguard.instrumentation.watch import Watch

F = TypeVar("F", bound=Callable[..., Any])


class Span:
    """A row for one block, or for each call of the function that it decorates."""

    def __init__(self, watch: Watch, label: object) -> None:
        self._watch, self._label = watch, label
        self._row: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        if self._row is not None:
            raise UsageError(
                f"the span {str(self._label)!r} was used before: a span is used once",
                hint="write with seen.span(label): at each block; rows may have the same label",
            )
        self._row = self._watch.row(self._label, "span")
        self._row.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._row is not None:
            self._row.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Give each call of a plain function a row."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with Span(self._watch, self._label):
                return function(*args, **kwargs)

        return cast("F", call)
