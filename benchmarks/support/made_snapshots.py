"""Snapshots as torch dumps them, of any size: what examples/make_snapshot.py makes, and one of many blocks."""

import importlib.util
import pickle
from pathlib import Path
from typing import Any, Final

from support.commands import ROOT

BLOCKS_A_SEGMENT: Final = 100
FRAMES: Final = 24
STACKS: Final = 400


def example() -> Any:
    """The module examples/make_snapshot.py."""
    spec = importlib.util.spec_from_file_location("make_snapshot", ROOT / "examples" / "make_snapshot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_large(path: Path, blocks: int) -> None:
    """Write a snapshot of so many blocks in segments of 100, one in three free.

    As torch makes it, each live block has a stack of its own, a list that refers to frames noted once.
    """
    stacks = [
        [{"name": f"layer_{depth}", "filename": f"/job/model/part_{depth}.py", "line": kind} for depth in range(FRAMES)]
        for kind in range(STACKS)
    ]
    made, address = [], 0x7F0000000000
    for first in range(0, blocks, BLOCKS_A_SEGMENT):
        rows, start = [], address
        for number in range(first, min(first + BLOCKS_A_SEGMENT, blocks)):
            size, is_free = 512 * (1 + number % 2000), number % 3 == 2
            frames = [] if is_free else list(stacks[number % STACKS])
            state = "inactive" if is_free else "active_allocated"
            rows.append(
                {"address": address, "size": size, "requested_size": size - 12, "state": state, "frames": frames}
            )
            address += size
        made.append(
            {
                "device": 0,
                "address": start,
                "total_size": address - start,
                "allocated_size": sum(row["size"] for row in rows if row["state"] == "active_allocated"),
                "active_size": sum(row["size"] for row in rows if row["state"] == "active_allocated"),
                "requested_size": 0,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": rows,
            }
        )
    oom = {"action": "oom", "device_free": 1 << 28, "size": 1 << 31, "stream": 0, "time_us": 1, "frames": stacks[0]}
    whole = {"segments": made, "device_traces": [[oom]], "allocator_settings": {}, "external_annotations": []}
    with path.open("wb") as file:
        pickle.dump(whole, file, 4)
