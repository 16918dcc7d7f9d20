"""The JSON objects of a model's folder, which a stranger wrote: bounded in bytes and depth, each
key once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import ConfigError, InputError
from oomguard.core.files import read_regular

# Published configurations have up to some megabytes, indices of weights too, and both a depth below
# ten.
MAX_CONFIG_BYTES: Final = 16_000_000
MAX_DEPTH: Final = 64
_SHOWN_CHARS: Final = 60


def shown(value: object) -> str:
    """Return a stranger's value for a message: on one line, without control characters,
    cut short.
    """
    text = repr(value)
    if len(text) <= _SHOWN_CHARS:
        return text
    return f"{text[:_SHOWN_CHARS]}…"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: there is no such file, or it holds no JSON object that can be used.
        InputError: it is no regular file, too large, or cannot be read.
    """
    try:
        content = read_regular(path, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        raise ConfigError(
            "no such file", path=str(path), hint="a model folder holds a config.json"
        ) from None
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}", hint="expected a JSON file of the model"
        ) from None
    return parse_object(content, path)


def parse_object(content: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object; raises ConfigError, naming ``path``, for anything else."""
    try:
        parsed = json.loads(content.decode("utf-8"), object_pairs_hook=_each_once)
    except _TwiceError as error:
        raise ConfigError(
            f"{error} stands twice in one object, with two values", path=str(path)
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 at byte {error.start}", path=str(path)) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error}", path=str(path)) from None
    except ValueError:
        raise ConfigError("has a number of thousands of digits", path=str(path)) from None
    except RecursionError:
        raise _too_deep(path) from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"holds a {type(parsed).__name__}, not an object", path=str(path))
    if _is_deeper(parsed, MAX_DEPTH):
        raise _too_deep(path)
    return parsed


@contextlib.contextmanager
def mistakes_in(path: str) -> Iterator[None]:
    """Give the ConfigErrors that are raised inside the name of their file, where they have none
    yet.
    """
    try:
        yield
    except ConfigError as error:
        if error.path is not None:
            raise
        raise ConfigError(str(error), path=path, hint=error.hint) from None


class _TwiceError(Exception):
    """A key that stands twice in one object, with two values: readers differ in which of them
    counts.
    """


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if found[name] != value and value == value:  # noqa: PLR0124 - NaN is not two values
                raise _TwiceError(shown(name))
    return found


def _too_deep(path: Path) -> ConfigError:
    return ConfigError(f"nested more than {MAX_DEPTH} deep", path=str(path))


def _is_deeper(value: object, levels: int) -> bool:
    """Whether a parsed value is nested deeper than so many levels."""
    level: list[object] = [value]
    for _ in range(levels):
        level = [inner for part in level for inner in _inside(part)]
        if not level:
            return False
    return True


def _inside(part: object) -> Iterable[object]:
    values = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return (inner for inner in values if isinstance(inner, (dict, list)))
