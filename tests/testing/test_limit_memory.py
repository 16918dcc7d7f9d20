from __future__ import annotations

import threading

import pytest

from oomguard.core.errors import SettingError, UsageError

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import active_device, limit_memory  # noqa: E402

MIB = 2**20


def test_live_bytes_follow_tensors_as_they_come_and_go():
    with limit_memory("64 MiB") as device:
        a = torch.zeros(MIB)
        assert device.live_bytes == 4 * MIB
        b = a.view(-1, 2)
        assert device.live_bytes == 4 * MIB
        c = a + 1
        assert device.live_bytes == 8 * MIB
        del a, b, c
        assert device.live_bytes == 0
        assert device.peak_bytes == 8 * MIB


def test_the_operation_that_does_not_fit_raises_in_cudas_words():
    with limit_memory("8 MiB"):
        kept = torch.zeros(MIB)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(2 * MIB)
        assert str(caught.value).startswith(
            "CUDA out of memory. Tried to allocate 8.00 MiB. GPU 0 has a total capacity of 8.00 MiB of which 4.00 MiB is free."
            " Including non-PyTorch memory, this process has 4.00 MiB memory in use. Of the allocated memory 4.00 MiB"
        )
        assert kept.numel() == MIB


def test_what_an_operation_holds_meanwhile_counts_in_either_mode(subtests):
    for mode in [torch.no_grad, torch.inference_mode]:
        with subtests.test(mode=mode):
            logits, labels = torch.zeros(MIB // 4, 4), torch.zeros(MIB // 4, dtype=torch.long)
            with mode(), limit_memory("64 MiB") as device:
                device.adopt([logits, labels])
                before = device.live_bytes
                torch.nn.functional.cross_entropy(logits, labels)
                assert device.peak_bytes - before >= 4 * MIB  # their logarithms


def test_a_dropout_that_is_off_takes_nothing_in_either_mode(subtests):
    for mode in [torch.no_grad, torch.inference_mode]:
        with subtests.test(mode=mode):
            hidden = torch.zeros(MIB)
            with mode(), limit_memory("64 MiB") as device:
                device.adopt([hidden])
                torch.nn.functional.dropout(hidden, 0.1, training=False)
                assert device.peak_bytes <= hidden.nbytes


def test_what_failed_is_not_counted_afterwards():
    with limit_memory("8 MiB") as device:
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(4 * MIB)
        assert device.live_bytes == 0
        assert torch.zeros(MIB).numel() == MIB


def test_tensors_made_before_count_from_their_first_use():
    weights = torch.zeros(MIB)
    with limit_memory("64 MiB") as device:
        assert device.live_bytes == 0
        weights.sum()
        assert 4 * MIB <= device.live_bytes < 4 * MIB + 64


def test_tensors_can_be_counted_before_their_first_use():
    weights = torch.zeros(MIB)
    with limit_memory("64 MiB") as device:
        device.adopt([weights, weights[:10]])
        assert device.live_bytes == 4 * MIB
        del weights
        assert device.live_bytes == 0


def test_weights_that_are_too_large_by_themselves_fail_on_use():
    weights = torch.zeros(4 * MIB)
    with limit_memory("8 MiB"), pytest.raises(torch.OutOfMemoryError):
        weights.sum()


def test_devices_nest_and_end():
    with limit_memory("64 MiB") as outer:
        with limit_memory("32 MiB") as inner:
            assert active_device() is inner
        assert active_device() is outer
    assert active_device() is None


def test_a_thread_sees_its_own_device_first():
    entered = threading.Barrier(2)
    seen = {}

    def work(size):
        with limit_memory(size) as device:
            entered.wait()
            seen[size] = active_device() is device
            entered.wait()

    threads = [threading.Thread(target=work, args=(size,)) for size in ("8 MiB", "16 MiB")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"8 MiB": True, "16 MiB": True}


def test_peak_matches_the_profiler_of_torch():
    from torch.profiler import ProfilerActivity, profile

    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)
    ).eval()
    rows = torch.randn(256, 512)
    with torch.inference_mode(), limit_memory("1 GiB") as device:
        model(rows)  # now every weight has been seen
        device.reset_peak()
        model(rows)
        peak = device.peak_bytes
    with (
        torch.inference_mode(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        model(rows)
    live = highest = 0
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    weights = sum(p.nbytes for p in model.parameters()) + rows.nbytes
    assert peak == pytest.approx(weights + highest, rel=0.002)


def test_a_size_that_is_none_is_refused(subtests):
    for size in [
        "",
        "GiB",
        "77",
        "0",
        "9" * 400 + " GiB",
        "12 parsecs",
        "-1 MiB",
        "inf GiB",
        "nan",
        0,
        -5,
        1.5,
        True,
        None,
    ]:
        with subtests.test(size=size), pytest.raises(SettingError):
            limit_memory(size)


def test_sizes_are_read(subtests):
    for size, expected in [
        ("256 MiB", 256 * MIB),
        ("1GiB", 2**30),
        ("1.5 KiB", 1536),
        (77, 77),
        ("8 GB", 8 * 10**9),
        ("2tib", 2**41),
        ("77 B", 77),
    ]:
        with subtests.test(size=size, expected=expected):
            assert limit_memory(size).capacity_bytes == expected


def test_of_nested_devices_the_smaller_fails_and_both_count():
    with limit_memory("64 MiB") as outer, limit_memory("8 MiB") as inner:
        kept = torch.zeros(MIB)
        assert outer.live_bytes == inner.live_bytes == kept.nbytes
        with pytest.raises(torch.OutOfMemoryError, match=r"capacity of 8\.00 MiB"):
            torch.zeros(4 * MIB)


def test_a_device_fails_again_in_a_second_block():
    device = limit_memory("8 MiB")
    for _ in range(2):
        with device, pytest.raises(torch.OutOfMemoryError):
            torch.zeros(4 * MIB)


def test_another_thread_is_not_seen():
    made = []
    with limit_memory("8 MiB") as device:
        worker = threading.Thread(target=lambda: made.append(torch.zeros(4 * MIB)))
        worker.start()
        worker.join()
        assert made
        assert device.live_bytes == 0


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_a_sparse_tensor_counts_as_its_indices_and_values(subtests):
    for name, sparse in [
        ("coo", lambda dense: dense.to_sparse()),
        ("csr", lambda dense: dense.to_sparse_csr()),
        ("csc", lambda dense: dense.to_sparse_csc()),
        ("bsr", lambda dense: dense.to_sparse_bsr((2, 2))),
        ("bsc", lambda dense: dense.to_sparse_bsc((2, 2))),
    ]:
        with subtests.test(name), limit_memory("64 MiB") as device:
            made = sparse(torch.ones(256, 256))
            if made.layout is torch.sparse_coo:
                parts = (made._indices(), made._values())
            elif made.layout in (torch.sparse_csr, torch.sparse_bsr):
                parts = (made.crow_indices(), made.col_indices(), made.values())
            else:
                parts = (made.ccol_indices(), made.row_indices(), made.values())
            held = {
                part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts
            }
            assert device.live_bytes == sum(held.values()) >= 256 * 256 * 4
            del made, parts
            assert device.live_bytes == 0


def test_earlier_sparse_tensor_can_be_counted_before_use():
    weights = torch.ones(64, 64).to_sparse()
    with limit_memory("1 MiB") as outer, limit_memory("1 MiB") as device:
        device.adopt([weights])
        assert (outer.live_bytes, device.live_bytes) == (0, 64 * 64 * (2 * 8 + 4))


def test_a_device_decorates_a_plain_function_and_no_other():
    device = limit_memory("1 MiB")

    @device
    def ones(count):
        return torch.ones(count).sum().item()

    assert (ones(1000), device.peak_bytes) == (1000.0, 4004)
    with pytest.raises(torch.OutOfMemoryError):
        ones(MIB)

    async def later():
        """Return nothing."""

    for other in (later, int, 3):
        with pytest.raises(UsageError, match="decorates a plain function") as caught:
            device(other)
        assert "with limit_memory" in caught.value.hint


def test_a_size_without_a_unit_is_told_with_units():
    with pytest.raises(SettingError, match="'16' has no unit") as caught:
        limit_memory("16")
    assert caught.value.hint == 'write "16 GiB", "16 MiB" or "16 B"'


def test_grown_storage_fails_at_the_next_read_with_its_size(subtests):
    for caching in [False, True]:
        with (
            subtests.test(caching=caching),
            limit_memory("32 MiB", caching_allocator=caching) as device,
        ):
            grown = torch.zeros(4 << 20, dtype=torch.uint8)
            grown.untyped_storage().resize_(64 << 20)
            with pytest.raises(torch.OutOfMemoryError, match=r"allocate 6[04]\.00 MiB"):
                grown.zero_()
            with pytest.raises(torch.OutOfMemoryError) as caught:
                grown.zero_()
            assert "allocate 0 bytes" not in str(caught.value)
            grown.untyped_storage().resize_(0)
            grown.view(-1)
            assert device.live_bytes == 0
