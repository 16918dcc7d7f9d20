"""A simulated device with torch's caching allocator: reserved bytes, and a failure of fragmentation alone."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.diagnosis import diagnose
from oomguard.estimate.call.allocator import replay
from oomguard.probe import torch_memory

torch = pytest.importorskip("torch", reason="torch is not installed")
import oomguard  # noqa: E402
from oomguard.testing import limit_memory  # noqa: E402

MIB = 2**20


def made(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_tensors_lie_in_segments_and_freed_blocks_are_kept():
    with limit_memory("100 MiB", caching_allocator=True) as device:
        a, b = made(4), torch.zeros(1)
        assert (device.live_bytes, device.allocated_bytes, device.reserved_bytes) == (
            4 * MIB + 4,
            4 * MIB + 512,
            22 * MIB,
        )
        del a, b
        assert (device.live_bytes, device.allocated_bytes, device.reserved_bytes) == (
            0,
            0,
            22 * MIB,
        )
        device.empty_cache()
        assert (device.reserved_bytes, device.peak_reserved_bytes) == (0, 22 * MIB)
        device.reset_peak()
        assert device.peak_reserved_bytes == 0


def test_fragmented_free_memory_fails_and_the_message_shows_it():
    with limit_memory("80 MiB", caching_allocator=True) as device:
        pieces = [made(4) for _ in range(20)]
        kept = pieces[::2]
        del pieces
        assert (device.allocated_bytes, device.reserved_bytes, device.free_bytes) == (
            40 * MIB,
            80 * MIB,
            0,
        )
        assert device.largest_free_block_bytes == 4 * MIB
        with pytest.raises(torch.OutOfMemoryError) as caught:
            made(16)
        assert "Tried to allocate 16.00 MiB" in str(caught.value)
        assert (
            "40.00 MiB is allocated by PyTorch, and 40.00 MiB is reserved by PyTorch but unallocated"
            in str(caught.value)
        )
        assert len(kept) == 10
    (incident,) = diagnose(caught.value).incidents
    assert incident.causes[0].id == "fragmentation"
    with limit_memory("80 MiB"):
        pieces = [made(4) for _ in range(20)]
        kept = pieces[::2]
        del pieces
        assert made(16).nbytes == 16 * MIB


def test_a_full_device_gets_unused_segments_back_before_it_fails():
    with limit_memory("40 MiB", caching_allocator=True) as device:
        first = made(30)
        del first
        second = made(36)
        assert device.reserved_bytes == second.nbytes


def test_requested_bytes_are_reported_not_the_tensors():
    with (
        limit_memory("8 MiB", caching_allocator=True),
        pytest.raises(torch.OutOfMemoryError, match=r"allocate 20\.00 MiB"),
    ):
        made(2)


def test_weights_that_do_not_fit_fail_at_each_use():
    weights = made(16)
    with limit_memory("8 MiB", caching_allocator=True):
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                weights.sum()


def test_what_failed_is_not_held_afterwards():
    with limit_memory("24 MiB", caching_allocator=True) as device:
        with pytest.raises(torch.OutOfMemoryError):
            made(26)
        assert device.reserved_bytes == 0
        assert made(24).nbytes == 24 * MIB


def test_a_thread_that_looks_on_takes_no_part():
    def look():
        while not done.is_set():
            seen.append((device.reserved_bytes, device.free_bytes))

    seen, done = [], threading.Event()
    with limit_memory("64 MiB", caching_allocator=True, fail_at=[50, 250]) as device:
        watcher = threading.Thread(target=look)
        watcher.start()
        failed = 0
        for _ in range(300):
            try:
                made(4)
            except torch.OutOfMemoryError:
                failed += 1
        done.set()
        watcher.join()
        assert (failed, device.allocations, device.reserved_bytes) == (2, 300, 20 * MIB)
    assert set(seen) <= {(0, 64 * MIB), (20 * MIB, 44 * MIB), (20 * MIB, 64 * MIB), (0, 44 * MIB)}


def test_without_a_caching_allocator_torch_holds_what_is_alive():
    with limit_memory("24 MiB") as device:
        kept = made(3)
        assert (
            device.reserved_bytes
            == device.allocated_bytes
            == device.peak_reserved_bytes
            == kept.nbytes
        )
        assert device.largest_free_block_bytes == 0


@given(st.lists(st.tuples(st.integers(1, 30 * MIB), st.booleans()), min_size=1, max_size=30))
def test_it_holds_what_the_replayed_allocator_holds(steps):
    """Allocations, each followed by the end of the oldest one or not."""
    events, alive, tensors = [], [], []
    with limit_memory("2 GiB", caching_allocator=True) as device:
        for number, (size, ends) in enumerate(steps, start=1):
            tensors.append(torch.empty(size, dtype=torch.uint8))
            events.append((number, size))
            alive.append(number)
            if ends:
                events.append((alive.pop(0), 0))
                del tensors[0]
        assert device.peak_reserved_bytes == replay(events)


def test_guard_may_use_what_torch_keeps_and_the_device_has():
    with limit_memory("100 MiB", caching_allocator=True, other_processes="10 MiB"):
        kept = made(4)
        assert torch_memory.is_cached()
        assert torch_memory.free_bytes() == 90 * MIB - kept.nbytes
    with limit_memory("100 MiB"):
        assert not torch_memory.is_cached()


def test_guarded_function_runs_in_parts_with_cached_blocks():
    @oomguard.guard(batch="rows")
    def squares(rows):
        return list((torch.ones(len(rows), 2**18) * torch.tensor(rows)[:, None]).sum(dim=1))

    with limit_memory("45 MiB", caching_allocator=True) as device:
        found = squares([float(n) for n in range(40)])
        assert device.peak_reserved_bytes <= 45 * MIB
    assert [float(value) for value in found] == [n * 2.0**18 for n in range(40)]


def test_guarded_generate_rows_are_solved_by_their_blocks():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
    }
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, pad_token_id=0, eos_token_id=None
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 4096, (48, 128))
    call = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 4,
        "do_sample": False,
    }
    right = model.generate(**call)
    with limit_memory("60 MiB", caching_allocator=True), oomguard.guard() as g:
        assert torch.equal(model.generate(**call), right)
    # Blocks of 20 MiB are a third of so small a device, and no measurement of tensors tells of them.
    assert [attempt.succeeded for attempt in g.attempts] in ([False, True], [False, False, True])
    assert g.attempts[-1].settings["batch_size"] > 20
