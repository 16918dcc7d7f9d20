"""What the published families of models call things, and what their configurations leave to a default: one data file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.user_files import read_tables

_FILE: Final = Path(__file__).with_name("families.toml")
FAMILIES: Final[dict[str, Any]] = read_tables("families", [_FILE])[_FILE]


def encoder_decoder(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, str]] | None:
    """Return what a model of an encoder and a decoder calls the numbers of both, None for any other."""
    kind = config.get("model_type")
    found: Mapping[str, Mapping[str, str]] | None = (
        FAMILIES["encoder_decoder"].get(kind) if isinstance(kind, str) else None
    )
    return found
