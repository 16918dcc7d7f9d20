"""One test for all rows of a table: every row is checked, and the test lists all rows that fail."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(
    names: str | Iterable[str], rows: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test with every row, as ``pytest.mark.parametrize`` would, but collect it once.

    Fixtures are shared by all rows, so the rows must not depend on a fresh one.
    """
    if isinstance(names, str):
        columns = [name.strip() for name in names.split(",")]
    else:
        columns = list(names)
    table = list(rows)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def check(**fixtures: Any) -> None:
            assert table, "the table has no rows"
            failed: list[Exception] = []
            for row in table:
                if len(columns) == 1:
                    values = (row,)
                else:
                    values = tuple(row)
                try:
                    test(**fixtures, **dict(zip(columns, values, strict=True)))
                except (
                    pytest.fail.Exception
                ) as error:  # of pytest.raises; not an Exception, as a group's must be
                    failed.append(AssertionError(str(error)))
                    failed[-1].add_note(f"row: {row!r}")
                except Exception as error:  # noqa: BLE001
                    # whatever it is, the other rows are checked too
                    error.add_note(f"row: {row!r}")
                    failed.append(error)
            if failed:
                raise ExceptionGroup(f"{len(failed)} of {len(table)} rows", failed)

        signature = inspect.signature(test)
        left = [
            parameter for name, parameter in signature.parameters.items() if name not in columns
        ]
        check.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return check

    return decorate
