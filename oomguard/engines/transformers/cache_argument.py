"""The argument of a model that takes its cache, whatever this release of transformers calls it: ``cache`` since 5.24."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

# A release that has a new name still takes the old ones, with a warning.
NAMES: Final = ("cache", "past_key_values")


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache that a call is given, None where it is given none."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)


def name_in(model: Any) -> str | None:
    """Return what a model's forward calls its cache; None where it takes none."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in NAMES if name in parameters), None)


def with_cache(arguments: Mapping[str, Any], name: str, cache: Any) -> dict[str, Any]:
    """Return a call's arguments with this cache under this name, and under no other."""
    return {**{key: value for key, value in arguments.items() if key not in NAMES}, name: cache}
