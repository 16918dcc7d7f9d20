"""Which arguments of a model's forward hold rows, and which forbid that they are run apart."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.engines.transformers.independence import line_to_write
from oomguard.engines.transformers.media import Media
from oomguard.engines.transformers.tensors import is_tensor, tensors

_DATA: Final = Path(__file__).with_name("forward_arguments.toml")
_PIXEL_AXES: Final = 4


@functools.cache
def names(group: str) -> tuple[str, ...]:
    """Return the names of arguments of a kind."""
    return tuple(tomllib.loads(_DATA.read_text())[group])


def is_known(name: str) -> bool:
    """Return whether it is known what an argument of this name holds."""
    return any(name in names(group) for group in ("text", "others", "rows", "layers", "shared", "whole", "over_batch"))


def is_input(name: str, value: Any) -> bool:
    """Return whether an argument is an input of rows; flat patches of images of any size are not."""
    axes = getattr(value, "ndim", 0) if is_tensor(value) else 0
    return axes >= (_PIXEL_AXES if name == "pixel_values" else 2)


def why_over_batch(model: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return the option that adds to the result what belongs to all rows together; None where none is on."""
    for name in names("over_batch"):
        given = arguments.get(name)
        if getattr(model.config, name, False) if given is None else given:
            return f"{name} adds results of the tokens of all rows together, and a number over all rows (aux_loss)"
    return None


def why_not_rows(arguments: Mapping[str, Any], rows: int, media: Media, taken: Collection[str] = ()) -> str | None:
    """Return the argument that forbids a split, and why; None where each one is cut, or is for all rows together.

    ``taken`` are those that are cut though nobody has listed them.
    """
    if any(arguments.get(name) is not None for name in names("text")):
        for name in names("beside_text"):
            if arguments.get(name) is not None and name not in media.starts and name not in taken:
                why = f"the argument {name} is not known to belong to the text row by row"
                return f"{why}. {line_to_write(arguments, rows)}"
    for name, value in arguments.items():
        if name in media.starts or name in taken:
            continue
        if _is_state(value):
            return f"the argument {name} is extended by the call"
        for tensor in tensors(value):
            if not is_cut(name, tensor, rows) and not _is_whole(name, tensor):
                why = f"the argument {name} is not known to hold one row per input"
                return f"{why}. {line_to_write(arguments, rows)}"
        if isinstance(value, (list, tuple)) and len(value) == rows > 1 and not any(True for _ in tensors(value)):
            return f"the argument {name} has {rows} entries too"
    return None


def is_cut(name: str, value: Any, rows: int) -> bool:
    """Return whether a tensor of this name has one entry a row."""
    known = name in names("rows") or name in names("text") or name in names("others")
    if name == "position_ids" and value.ndim > 2:
        known = False  # some models put an axis of three before the rows
    return bool(known and value.ndim > 0 and value.shape[0] == rows)


def _is_whole(name: str, value: Any) -> bool:
    return value.ndim == 0 or name in names("whole") or (name in names("shared") and value.shape[0] == 1)


def _is_state(value: Any) -> bool:
    """Return whether a value is a cache, in whatever form: a call adds its own tokens to it."""
    return any(base.__name__ == "Cache" for base in type(value).__mro__)
