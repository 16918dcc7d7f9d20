"""What vLLM's compile cache on this machine says of the next start: whether it compiles, and so
measures the larger peak.

An entry is named by a hash of the engine's version, the settings, the traced code and the
environment, which only vLLM itself can make. Beside the compiled code it keeps the graph as text,
and there the embedding's table stands with its shape on a rank. So where no entry has that table on
as many ranks, the next start compiles for certain; where one has it, it compiles only if something
else changed.

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
# The table is an argument of the graph, among the first lines; those of the largest models have
# some MiB.
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
    """Return whether an entry may be of a model on so many ranks; False where the next start
    compiles for certain.

    Args:
        root: vLLM's cache folder; one that is not there has no entries.
        shape: the model's numbers.
        ranks: ranks that share the embedding's table.
        stages: pipeline stages of so many ranks each.
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
    """Whether an entry was made by so many ranks, and the graph of the first has the table."""
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
