"""What the published families of models call things, and what their configurations leave to a default: one data file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from oomguard.user_files import read_tables

_FILE: Final = Path(__file__).with_name("families.toml")
FAMILIES: Final[dict[str, Any]] = read_tables("families", [_FILE])[_FILE]
