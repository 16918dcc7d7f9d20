"""Predict from vLLM's compile cache whether the next start compiles and so has a larger peak.

A hash of the engine's version, the settings, the traced code and the environment names an entry,
and only vLLM can compute it. Each entry also has the graph as text, with the shape of the embedding
on a rank. If no entry has that shape for as many ranks, the next start certainly compiles. If one
has it, the start compiles only if something else changed.

Layout: ``VllmBackend.__call__`` in vllm/compilation/backends.py of 0.17 to 0.33.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from oomguard.estimate.model.shape import ModelShape

_FOLDER: Final = "torch_compile_cache"
_GRAPH: Final = "computation_graph.py"
_VOCAB_PADDING_ROWS: Final = 64
_MOST_ENTRIES: Final = 1_000
# The embedding is an argument of the graph, in its first lines. The largest models' arguments have
# a few MiB.
_MOST_BYTES: Final = 4 << 20


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Return vLLM's cache folder by its own rules (vllm/envs.py, VLLM_CACHE_ROOT)."""
    given = environ.get("VLLM_CACHE_ROOT")
    if given:
        return Path(given).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vllm"


def has_entry(
    root: Path,
    shape: ModelShape,
    ranks: int,
    stages: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> bool:
    """Return whether the cache may have an entry for this model and number of ranks.

    False means that the next start certainly compiles.

    Args:
        root: vLLM's cache folder; a missing folder has no entries.
        shape: the model's numbers.
        ranks: the number of ranks that share the embedding.
        stages: pipeline stages with that many ranks each.
        environ: the environment; ``VLLM_DISABLE_COMPILE_CACHE`` makes every start compile.
    """
    if environ.get("VLLM_DISABLE_COMPILE_CACHE", "0") not in {"", "0"}:
        return False
    rows = -(-shape.vocab // _VOCAB_PADDING_ROWS) * _VOCAB_PADDING_ROWS // ranks
    table = re.compile(rf"\[{rows}, {shape.hidden}\]".encode())
    return any(_holds(entry, table, ranks * stages) for entry in _entries(root))


def _entries(root: Path) -> Iterator[Path]:
    try:
        with os.scandir(root / _FOLDER) as found:
            for number, entry in enumerate(found):
                if number >= _MOST_ENTRIES:
                    return
                if entry.is_dir():
                    yield Path(entry.path)
    except OSError:
        return


def _holds(entry: Path, table: re.Pattern[bytes], ranks: int) -> bool:
    """Return whether an entry has that many ranks and its first graph has the embedding."""
    try:
        folders = sorted(path.name for path in entry.glob("rank_*_0"))
        if folders != sorted(f"rank_{rank}_0" for rank in range(ranks)):
            return False
        return any(
            table.search(_first_bytes(graph)) for graph in entry.glob(f"rank_0_0/*/{_GRAPH}")
        )
    except OSError:
        return False


def _first_bytes(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(_MOST_BYTES)
