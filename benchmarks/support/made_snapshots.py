"""Snapshots as torch dumps them, made by examples/make_snapshot.py."""

import importlib.util
from typing import Any

from support.commands import ROOT


def example() -> Any:
    """The module examples/make_snapshot.py."""
    spec = importlib.util.spec_from_file_location(
        "make_snapshot", ROOT / "examples" / "make_snapshot.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
