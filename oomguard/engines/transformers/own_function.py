"""What to write where nothing tells whose an argument is: a function of the user's own, who knows what has one entry a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_own_function(reason: str, arguments: Mapping[str, Any], rows: int) -> str:
    """Return why a call is not run in parts, with the function to write instead; its arguments are those with one entry a row."""
    names = [name for name, value in arguments.items() if getattr(value, "shape", ())[:1] == (rows,)]
    batch = (
        "(" + ", ".join(f'"{name}"' for name in names) + ")" if len(names) > 1 else f'"{names[0]}"' if names else "..."
    )
    takes = ", ".join(names) or "..."
    return (
        f"{reason}. Where you know what has one entry a row, make the batch and the call in a function that takes it: "
        f"@oomguard.guard(batch={batch}) above def f({takes})"
    )
