"""CUDA's counters and NVML's, over stand-ins of their functions; with a real device under `make test-gpu`."""

from __future__ import annotations

import pytest

import oomguard
from oomguard.probe import torch_memory

torch = pytest.importorskip("torch", reason="torch is not installed")
GIB = 2**30
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def by_name(uses):
    return {f"{use.device} {use.what}": use for use in uses}


def test_cuda_counters_show_exact_peaks_and_limits(cuda):
    cuda.allocate(GIB)
    with oomguard.watch(sample_every_s=60) as seen:
        cuda.allocate(3 * GIB)
        cuda.allocate(-2 * GIB)
    use = by_name(seen.uses)["cuda:0 allocated"]

    assert (use.before_bytes, use.peak_bytes, use.after_bytes) == (GIB, 4 * GIB, 2 * GIB)
    assert (use.limit_bytes, use.sampled) == (4 * GIB, False)
    assert by_name(seen.uses)["cuda:0 reserved"].peak_bytes == 8 * GIB
    assert not [use for use in seen.uses if use.device == "cuda:1"]


def test_a_device_that_is_first_used_inside_is_seen_from_then_on(cuda):
    with oomguard.watch(sample_every_s=60) as seen:
        cuda.allocate(5 * GIB, index=1)
        cuda.allocate(-4 * GIB, index=1)
    use = by_name(seen.uses)["cuda:1 allocated"]

    assert (use.before_bytes, use.peak_bytes, use.after_bytes) == (None, 5 * GIB, GIB)


def test_a_peak_before_the_watch_is_none_of_it(cuda):
    cuda.allocate(6 * GIB)
    cuda.allocate(-5 * GIB)
    with oomguard.watch(sample_every_s=60) as seen:
        cuda.allocate(GIB)
    assert by_name(seen.uses)["cuda:0 allocated"].peak_bytes == 2 * GIB


def test_outer_watch_keeps_its_peak_despite_inner_ones(cuda):
    with oomguard.watch(sample_every_s=60) as outer:
        cuda.allocate(4 * GIB)
        cuda.allocate(-4 * GIB)
        with torch_memory.MemoryPeak() as of_a_guard:
            cuda.allocate(2 * GIB)
            cuda.allocate(-2 * GIB)
        with oomguard.watch(sample_every_s=60) as inner, inner.span("small"):
            cuda.allocate(GIB)
    (row,) = inner.rows

    assert of_a_guard.bytes == 2 * GIB
    assert by_name(outer.uses)["cuda:0 allocated"].peak_bytes == 4 * GIB
    assert by_name(inner.uses)["cuda:0 allocated"].peak_bytes == GIB
    assert (row.use.before_bytes, row.use.peak_bytes, row.use.limit_bytes) == (0, GIB, 4 * GIB)


def test_nvml_tells_this_process_and_the_others_apart(driver):
    with oomguard.watch(sample_every_s=60) as seen:
        assert driver.sessions == 1
        driver.used[1] = 4 * GIB
    found = by_name(seen.uses)

    assert driver.sessions == 0
    assert (
        found["GPU 0 other processes"].before_bytes,
        found["GPU 0 other processes"].after_bytes,
    ) == (GIB, 4 * GIB)
    assert found["GPU 0 this process"].after_bytes == 2 * GIB
    assert (found["GPU 0 in use"].peak_bytes, found["GPU 0 in use"].limit_bytes) == (
        6 * GIB,
        8 * GIB,
    )
    assert found["GPU 0 in use"].sampled
    assert "GPU 1 in use" in found


def test_nvml_figures_are_under_the_name_of_torchs_device(cuda, driver):
    cuda.allocate(GIB)
    with oomguard.watch(sample_every_s=60) as seen:
        pass
    assert [use.what for use in seen.uses if use.device == "cuda:0"] == [
        "allocated",
        "reserved",
        "in use",
        "this process",
        "other processes",
    ]
    assert not [use for use in seen.uses if use.device.startswith("GPU")]


def test_only_the_sum_is_known_in_a_container_with_other_pids(driver, monkeypatch):
    monkeypatch.setattr("oomguard.instrumentation.sees_host_pids", lambda: False)
    with oomguard.watch(sample_every_s=60) as seen:
        pass
    assert [use.what for use in seen.uses if use.device == "GPU 0"] == ["in use"]


def test_a_size_that_the_driver_hides_leaves_whose_it_is_unknown(driver):
    driver.used.clear()
    driver.nvmlDeviceGetComputeRunningProcesses = lambda _: [
        type("Process", (), {"pid": __import__("os").getpid(), "usedGpuMemory": None})
    ]
    with oomguard.watch(sample_every_s=60) as seen:
        pass
    assert [use.what for use in seen.uses if use.device == "GPU 0"] == ["in use"]


def test_failing_driver_costs_only_samples(driver):
    with oomguard.watch(sample_every_s=0.01) as seen:
        driver.nvmlDeviceGetMemoryInfo = None
    assert [use.device for use in seen.uses if use.after_bytes is not None] == ["host"]


def test_cuda_error_makes_counters_unknown_and_passes_through(cuda, monkeypatch):
    def fails(_index):
        raise RuntimeError("CUDA error: device-side assert triggered")

    with (
        pytest.raises(ValueError, match="mine"),
        oomguard.watch(sample_every_s=60) as seen,
        seen.span("work"),
    ):
        cuda.allocate(GIB)
        seen.mark("allocated")
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", fails)
        raise ValueError("mine")
    use = by_name(seen.uses)["cuda:0 allocated"]

    assert (use.before_bytes, use.peak_bytes, use.after_bytes) == (None, GIB, None)
    assert (seen.timeline.error, seen.rows[0].error) == ("ValueError", "ValueError")


def test_error_in_the_watch_is_logged_and_replaces_nothing(monkeypatch, caplog):
    def fails(_self):
        raise TypeError("ours")

    monkeypatch.setattr("oomguard.instrumentation.Readings.of_call", fails)
    with oomguard.watch(sample_every_s=60) as seen, seen.span("work"):
        done = True
    assert done
    assert "the watch failed" in caplog.text
    assert seen.rows == ()


@pytest.mark.gpu
@NO_CUDA
def test_on_a_real_device_the_peak_is_torchs_own():
    torch.cuda.empty_cache()
    with oomguard.watch() as seen:
        kept = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        more = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
        del more
        peak = torch.cuda.max_memory_allocated()
    found = by_name(seen.uses)

    assert found["cuda:0 allocated"].peak_bytes == peak >= 768 << 20
    assert found["cuda:0 allocated"].after_bytes == torch.cuda.memory_allocated()
    assert found["cuda:0 reserved"].peak_bytes == torch.cuda.max_memory_reserved()
    assert found["cuda:0 in use"].after_bytes >= kept.nbytes
