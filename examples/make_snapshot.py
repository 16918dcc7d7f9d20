"""Write a memory snapshot in PyTorch's format, without a GPU.

    python examples/make_snapshot.py [FILE]

It shows a fragmented GPU of 24 GiB on which an allocation of 1.5 GiB failed. The format is that of
torch 2.13 (torch/csrc/cuda/memory_snapshot.cpp), so PyTorch's viewer opens the file too. The
numbers are invented.
"""

import pickle
import sys
from collections.abc import Sequence
from typing import Any

MIB = 2**20
FIRST_ADDRESS = 0x7F0000000000
SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "pinned_num_register_threads": 1,
    "release_lock_on_cudamalloc": False,
    "pinned_use_cuda_host_register": False,
    "roundup_power2_divisions": {str(2**n): 0 for n in range(16)},
}


def stack(*lines: tuple[str, int, str]) -> list[dict[str, Any]]:
    """Return a stack in PyTorch's form: innermost frame first, C++ frames before Python frames."""
    inner = [
        ("torch::unwind::unwind()", "??", 0),
        ("torch::CapturedTraceback::gather(bool, bool, bool)", "??", 0),
    ]
    python = [("forward", "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134)]
    outer = [(name, filename, line) for filename, line, name in lines]
    return [
        {"name": name, "filename": filename, "line": line}
        for name, filename, line in [*inner, *python, *outer]
    ]


class Recorder:
    """Collect the segments, blocks and events of a snapshot.

    Args:
        devices: the number of GPUs.
    """

    def __init__(self, devices: int = 1) -> None:
        self._address = FIRST_ADDRESS
        self._time_us = 1_764_000_000_000_000
        self.segments: list[dict[str, Any]] = []
        self.traces: list[list[dict[str, Any]]] = [[] for _ in range(devices)]

    def segment(
        self,
        blocks: Sequence[tuple[int, str, list[dict[str, Any]]]],
        *,
        device: int = 0,
        stream: int = 0,
        pool: tuple[int, int] = (0, 0),
        is_expandable: bool = False,
    ) -> None:
        """Add a segment.

        Args:
            blocks: for each block its bytes, its state (``active_allocated``,
                ``active_pending_free`` or ``inactive``) and its stack.
        """
        address = self._address
        rows = []
        for size, state, frames in blocks:
            if state != "inactive":
                requested = size - 100
            else:
                requested = 0
            rows.append(
                {
                    "address": address,
                    "size": size,
                    "requested_size": requested,
                    "state": state,
                    "frames": frames,
                }
            )
            if state != "inactive":
                self._event(device, "alloc", size, frames, addr=address, stream=stream)
            address += size
        live = sum(row["size"] for row in rows if row["state"] == "active_allocated")
        active = sum(row["size"] for row in rows if row["state"] != "inactive")
        total = address - self._address
        self.segments.append(
            {
                "device": device,
                "address": self._address,
                "total_size": total,
                "allocated_size": live,
                "active_size": active,
                "requested_size": sum(row["requested_size"] for row in rows),
                "stream": stream,
                "segment_type": "large" if total > 2 * MIB else "small",
                "segment_pool_id": pool,
                "is_expandable": is_expandable,
                "frames": [],
                "blocks": rows,
            }
        )
        self._address = -(-address // (2 * MIB)) * 2 * MIB + 2 * MIB

    def refuse(
        self, size: int, device_free: int, frames: list[dict[str, Any]], *, device: int = 0
    ) -> None:
        """Add a failed allocation; ``device_free`` is the driver's free memory in bytes."""
        self._event(device, "oom", size, frames, device_free=device_free, stream=0)

    def _event(
        self, device: int, action: str, size: int, frames: list[dict[str, Any]], **more: int
    ) -> None:
        self._time_us += 10
        row = {
            "action": action,
            **more,
            "size": size,
            "time_us": self._time_us,
            "compile_context": "N/A",
        }
        self.traces[device].append({**row, "user_metadata": "", "frames": frames})

    def snapshot(self) -> dict[str, Any]:
        """Return the snapshot in the form of ``torch.cuda.memory._snapshot()``."""
        return {
            "segments": self.segments,
            "device_traces": self.traces,
            "allocator_settings": SETTINGS,
            "external_annotations": [],
        }


def in_pieces() -> dict[str, Any]:
    """Return the snapshot of a device whose free memory is split into pieces that are too small."""
    made = Recorder()
    load = stack(("/job/model.py", 41, "load_weights"), ("/job/extract.py", 12, "main"))
    cache = stack(
        ("/job/model.py", 88, "grow_cache"),
        ("/job/model.py", 131, "decode"),
        ("/job/extract.py", 30, "answer"),
    )
    hidden = stack(
        ("/job/model.py", 117, "mlp"),
        ("/job/model.py", 131, "decode"),
        ("/job/extract.py", 30, "answer"),
    )
    graph = stack(("/job/graphs.py", 19, "capture"), ("/job/extract.py", 15, "main"))
    for _ in range(28):
        made.segment([(512 * MIB, "active_allocated", load)])
    for _ in range(16):  # each free block of the cache lies between two used blocks
        made.segment(
            [
                (96 * MIB, "active_allocated", cache),
                (160 * MIB, "inactive", []),
                (128 * MIB, "active_allocated", cache),
            ]
        )
    made.segment([(768 * MIB, "active_allocated", hidden), (256 * MIB, "inactive", [])])
    made.segment([(256 * MIB, "active_allocated", graph)], pool=(0, 1))
    made.segment(
        [(64 * 1024, "active_allocated", hidden)] * 20 + [(3 * 256 * 1024, "inactive", [])]
    )
    logits = stack(
        ("/job/model.py", 140, "logits"),
        ("/job/model.py", 133, "decode"),
        ("/job/extract.py", 30, "answer"),
    )
    made.refuse(1536 * MIB, 380 * MIB, logits)
    return made.snapshot()


if __name__ == "__main__":
    with open(sys.argv[1] if len(sys.argv) > 1 else "snapshot.pickle", "wb") as file:
        pickle.dump(in_pieces(), file)
