"""Devices and who holds their memory, on records."""

from __future__ import annotations

from oomguard.probe.checks import device_checks, left_over_checks
from oomguard.probe.nvml import Device, Holder
from support.each import each

GIB = 2**30


def test_missing_nvml_is_unknown_and_not_zero(tmp_path):
    (check,) = device_checks(None, {}, tmp_path)

    assert check.status == "unknown"
    assert "unknown, not zero" in check.text


def test_missing_nvml_beside_a_loaded_driver_is_a_problem(tmp_path):
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Kernel Module  570.86.15  Thu\n"
    )
    (check,) = device_checks(None, {}, tmp_path)

    assert check.status == "problem"
    assert "570.86.15" in check.text


def test_a_device_is_told_with_its_figures_and_its_holders(tmp_path):
    device = Device(0, "GPU A", 24 * GIB, 10 * GIB, {41: 13 * GIB, 42: None})
    _, check = device_checks((device,), {41: Holder("python", "alice", own=True)}, tmp_path)

    assert check.status == "ok"
    assert check.text == (
        "device 0: GPU A, 10.00 GiB of 24.00 GiB free; used by pid 41 (python, alice) 13.00 GiB, "
        "pid 42 (not seen from here) an unknown size"
    )


@each(
    ("device", "words"),
    [
        (
            Device(0, "GPU A", 24 * GIB, 10 * GIB, {}),
            "14.00 GiB is used by processes that are not visible here",
        ),
        (
            Device(0, "GPU A", 24 * GIB, 10 * GIB, None),
            "the processes that use the rest are unknown",
        ),
        (Device(0, None, None, None, None), "name unknown, its memory is unknown"),
    ],
)
def test_what_a_device_does_not_say_is_unknown(tmp_path, device, words):
    _, check = device_checks((device,), {}, tmp_path)

    assert check.status == "unknown"
    assert words in check.text


def test_memory_of_other_users_is_a_problem_with_advice():
    devices = (
        Device(0, "A", 24 * GIB, GIB, {41: 13 * GIB, 42: None}),
        Device(1, "B", 24 * GIB, 20 * GIB, {}),
    )
    holders = {41: Holder("python", "bob", own=False), 42: Holder("python", "alice", own=True)}
    check = next(c for c in left_over_checks(devices, holders) if "other users" in c.text)

    assert (check.status, check.advice) == ("problem", "export CUDA_VISIBLE_DEVICES=1")
    assert check.text == "other users use device memory: bob (pid 41) 13.00 GiB of device 0"


def test_one_s_own_processes_are_no_left_overs():
    devices = (Device(0, "A", 24 * GIB, GIB, {42: GIB, 43: GIB}),)

    assert not [
        c
        for c in left_over_checks(devices, {42: Holder("python", "alice", own=True)})
        if "users" in c.text
    ]
