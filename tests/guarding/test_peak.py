"""The peak that a guard measures is its own: on a simulated device the user's begins anew with ``reset_peak`` alone."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import limit_memory  # noqa: E402

MIB = 2**20


def extract(papers):
    return list(torch.zeros(len(papers), 1024, 256).sum(dim=(1, 2)))  # 1 MiB a row


def split(_folder):
    oomguard.guard(batch="papers", max_attempts=30)(extract)(
        [1] * 20
    )  # a cached block of 10 MiB takes 20


def loop(_folder):
    for attempt in oomguard.attempts(batch_size=64):
        with attempt:
            extract([1] * attempt.settings["batch_size"])


def mapped(folder):
    oomguard.map(
        extract, range(20), store=folder / "store.sqlite", identity={"model": 1}, progress=False
    )


def test_users_peak_survives_every_kind_of_guarded_work(subtests, tmp_path):
    for work in [split, loop, mapped]:
        with subtests.test(work=work), limit_memory("16 MiB", caching_allocator=True) as device:
            loaded = torch.zeros(15 * MIB // 4)
            del loaded
            work(tmp_path)
            assert device.peak_bytes >= 15 * MIB
            device.reset_peak()
            assert device.peak_bytes == device.live_bytes
