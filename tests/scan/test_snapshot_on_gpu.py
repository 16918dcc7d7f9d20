"""A snapshot on a real GPU (`make test-gpu`): taken where the allocator gives up, and read back with torch's own figures."""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
from support.cuda_limit import limit_cuda  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MIB = 1 << 20
PIECES, SEGMENT_BYTES, KEPT_BYTES, REST_BYTES = 6, 100 * MIB, 60 * MIB, 40 * MIB


@pytest.fixture(autouse=True)
def _nothing_left():
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def empty(size_bytes):
    return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")


def in_pieces():
    """Blocks that leave a rest in each of their segments: no segment can go back to the device."""
    segments = [empty(SEGMENT_BYTES) for _ in range(PIECES)]
    del segments
    return [empty(KEPT_BYTES) for _ in range(PIECES)]


def capped():
    """A device that this process may fill in part: the driver has room, and torch does not ask it."""
    return limit_cuda(torch.cuda.memory_reserved() + PIECES * SEGMENT_BYTES + 10 * MIB)


@contextlib.contextmanager
def full():
    """A device that is full but for what the pieces take."""
    room, _ = torch.cuda.mem_get_info()
    rest = empty((room - PIECES * SEGMENT_BYTES) // MIB * MIB - 128 * MIB)
    yield
    del rest


def refused(path, device):
    """Run out of memory under a guard; return torch's own figures of that moment."""
    with device(), oomguard.guard(snapshot=path) as g:
        held = in_pieces()
        with pytest.raises(torch.OutOfMemoryError):
            empty(200 * MIB)
        stats, segments = torch.cuda.memory_stats(), torch.cuda.memory_snapshot()
        assert g.snapshot == path
        del held
    free = [
        block["size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "requested": stats["requested_bytes.all.current"],
        "segments": len(segments),
        "blocks": sum(len(segment["blocks"]) for segment in segments),
        "largest free": max(free),
        "split free": stats["inactive_split_bytes.all.current"],
    }


def test_totals_are_those_of_torch_at_the_moment_of_the_failure(tmp_path, told):
    path = tmp_path / "snapshot.pickle"
    own = refused(path, capped)
    (device,) = [one for one in oomguard.diagnose(path).snapshot.devices if one.reserved_bytes]
    read = {
        "allocated": device.allocated_bytes,
        "reserved": device.reserved_bytes,
        "requested": device.requested_bytes,
        "segments": device.segments,
        "blocks": device.blocks,
        "largest free": device.largest_free_bytes,
        "split free": device.split_bytes,
    }

    told(f"read from a snapshot of {path.stat().st_size} bytes", read, f"torch's {own}")
    assert read == own
    assert device.refusals == 1
    assert not device.is_later
    assert (device.refusal.tried_bytes, device.refusal.largest_free_bytes) == (
        200 * MIB,
        REST_BYTES,
    )
    assert device.stacks[0].bytes == PIECES * KEPT_BYTES
    assert device.stacks[0].frames[0].function == "empty"


def test_the_command_reads_the_same_and_names_the_cause(tmp_path, told):
    path = tmp_path / "snapshot.pickle"
    own = refused(path, full)
    done = subprocess.run(
        [sys.executable, "-m", "oomguard", "diagnose", "--format", "json", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    record = json.loads(done.stdout)
    (device,) = [one for one in record["snapshot"]["devices"] if one["reserved_total_bytes"]]
    cause = record["incidents"][0]["causes"][0]

    told(
        "by the command",
        f"{device['allocated_bytes']} of {device['reserved_total_bytes']} bytes, {cause['id']} {cause['confidence']}",
    )
    assert (device["allocated_bytes"], device["reserved_total_bytes"]) == (
        own["allocated"],
        own["reserved"],
    )
    assert device["largest_free_block_bytes"] == own["largest free"]
    assert record["incidents"][0]["facts"]["tried_bytes"] == 200 * MIB
    assert cause["id"] == "fragmentation"


def test_split_function_keeps_the_snapshot_of_its_failure(tmp_path, told):
    path = tmp_path / "snapshot.pickle"

    @oomguard.guard(batch="rows", snapshot=path)
    def doubled(rows):
        wide = rows.to("cuda").repeat(1, 1 << 20)  # 4 MiB a row
        return (2 * wide).sum(1).cpu()

    rows = torch.arange(64, dtype=torch.float32).reshape(-1, 1)
    whole = doubled(rows)
    torch.cuda.empty_cache()
    assert not path.exists()
    with limit_cuda(torch.cuda.memory_reserved() + 300 * MIB):
        parts = doubled(rows)
    (device,) = [one for one in oomguard.diagnose(path).snapshot.devices if one.reserved_bytes]

    rows_at_a_time = [attempt.settings["batch_size"] for attempt in doubled.attempts]
    told(
        "a function in parts, rows at a time",
        f"{rows_at_a_time}; its snapshot: {device.refusals} refused, {device.reserved_bytes // MIB} MiB held",
    )
    torch.testing.assert_close(parts, whole)
    assert device.refusals == 1
