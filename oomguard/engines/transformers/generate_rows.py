"""Whether what ``generate`` gives of a model has one row per input, as the model itself tells before anything runs."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from oomguard.engines.transformers.cache_argument import NAMES as CACHES

# Arguments that hold one text per row where they are a list of as many.
ROW_LISTS: Final = frozenset({"adapter_names", "language"})
# Arguments that see the whole batch, or count its rows.
UNSPLITTABLE: Final = (
    "streamer",
    *CACHES,
    "assistant_model",
    "encoder_outputs",
    "custom_generate",
    "negative_prompt_ids",
)
_DATA: Final = Path(__file__).with_name("forward_arguments.toml")
_TEXT: Final = "text"


@functools.cache
def _row_arguments() -> frozenset[str]:
    return frozenset(tomllib.loads(_DATA.read_text())["generate"])


def is_row_argument(name: str) -> bool:
    """Return whether an argument of this name is known to hold one row per input."""
    return name in _row_arguments()


def is_overridden(model: Any) -> bool:
    """Return whether a model's ``generate`` is not that of transformers."""
    owner = next((base for base in type(model).__mro__ if "generate" in vars(base)), None)
    return owner is not None and owner.__module__ != "transformers.generation.utils"


def why_not_rows(model: Any) -> str | None:
    """Return why what a model generates is not one row of tokens per input, or not the same in parts; None where nothing tells."""
    gives = getattr(model, "output_modalities", None) or (_TEXT,)
    if is_overridden(model) and _TEXT not in gives:
        return (
            f"generate of {type(model).__name__} gives {' and '.join(map(str, gives))}, not one row of tokens per input"
        )
    return None


def is_of_all_rows(model: Any, name: str, value: Sequence[Any], rows: int) -> bool:
    """Return whether a list may be handed to a part: it is one text a row and cut, an option of generation, or no list of rows."""
    if name in ROW_LISTS:
        return len(value) == rows
    return rows == 1 or len(value) != rows or hasattr(getattr(model, "generation_config", None), name)
