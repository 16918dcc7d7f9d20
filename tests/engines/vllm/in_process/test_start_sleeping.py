"""A sleeping engine is woken where what its workers gave up is free, and not where it is not."""

from __future__ import annotations

import os

import pytest

from oomguard import WakeUpError
from oomguard.engines.vllm.in_process import start
from oomguard.engines.vllm.in_process.start import check_room, freed_bytes
from oomguard.probe.nvml import Device

GIB = 2**30
WORKER, OTHER = 4100, 2**22 + 1  # no process has the second number
SLEPT = {
    "pid": WORKER,
    "text": "Sleep mode freed 12.40 GiB memory, 1.10 GiB memory is still in use.",
}


def on(monkeypatch: pytest.MonkeyPatch, *found: Device) -> None:
    monkeypatch.setattr(start, "devices", lambda: found)


def device(free_gib: float, pids: dict[int, int | None] | None, index: int = 0) -> Device:
    return Device(index, "Fake GPU", 24 * GIB, round(free_gib * GIB), pids)


def test_what_a_worker_gave_up_is_what_it_said_last():
    rows = [
        SLEPT,
        {
            "pid": WORKER,
            "text": "Sleep mode freed 2.00 GiB memory, 1.10 GiB memory is still in use.",
        },
        {"pid": 9},
    ]
    assert freed_bytes(rows) == {WORKER: pytest.approx(2 * GIB, abs=GIB // 100)}


def test_too_little_free_memory_has_both_numbers_and_holders(monkeypatch):
    on(monkeypatch, device(3.2, {WORKER: GIB, OTHER: 9 * GIB, OTHER + 1: None}))
    with pytest.raises(WakeUpError) as raised:
        check_room([SLEPT])
    assert str(raised.value) == (
        "oomguard did not wake the engine after sleep 1: it needs 12.40 GiB on GPU 0, but 3.20 GiB is free;"
        f" another process (PID {OTHER}) has 9.00 GiB, another process (PID {OTHER + 1}) has an unknown part"
    )
    assert "wake it up again" in raised.value.__notes__[0]


def test_a_trainer_in_the_same_program_is_named(monkeypatch):
    on(monkeypatch, device(3.2, {WORKER: GIB, os.getpid(): 9 * GIB}))
    with pytest.raises(WakeUpError, match="after sleep 2") as raised:
        check_room([SLEPT, SLEPT])
    assert f"this program (PID {os.getpid()}) has 9.00 GiB" in str(raised.value)
    assert "torch.cuda.empty_cache()" in raised.value.hint


def test_where_there_is_room_or_nothing_is_known_it_is_woken(subtests, monkeypatch):
    for found in [
        device(12.4, {WORKER: GIB}),  # there is room, to the last hundredth
        device(1.0, {OTHER: 9 * GIB}),  # another device than the worker's
        device(1.0, None),  # the driver does not tell who is on it
    ]:
        with subtests.test(found=found):
            on(monkeypatch, found)
            check_room([SLEPT])


def test_an_engine_that_never_slept_asks_no_driver(monkeypatch):
    monkeypatch.setattr(start, "devices", lambda: pytest.fail("asked"))
    check_room([{"pid": WORKER, "text": "Loading weights"}])


def test_workers_on_one_device_need_their_sum(monkeypatch):
    on(monkeypatch, device(20.0, {WORKER: GIB, WORKER + 1: GIB}))
    with pytest.raises(WakeUpError, match=r"needs 24\.79 GiB on GPU 0"):
        check_room([SLEPT, {**SLEPT, "pid": WORKER + 1}])
