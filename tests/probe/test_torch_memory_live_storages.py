"""Peaks of live storages: each is what it would be if every operation were compared with it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.probe.torch_memory import LiveStorages, PeakMeter


@dataclass
class Plain:
    """The same peaks, kept the plain way: every one is looked at after every operation."""

    peak: int = 0
    meters: list[tuple[PeakMeter, list[int]]] = field(default_factory=list)

    def note(self, now: int) -> None:
        self.peak = max(self.peak, now)
        for _, peak in self.meters:
            peak[0] = max(peak[0], now)


STEPS = st.lists(
    st.tuples(st.sampled_from(["run", "begin", "end", "reset"]), st.integers(0, 9)), max_size=60
)


@given(steps=STEPS)
def test_every_peak_is_the_maximum_since_its_own_begin(steps):
    storages, plain = LiveStorages(), Plain()
    for what, number in steps:
        if what == "run":
            storages.bytes = number
            storages.note_peak()
            plain.note(number)
        elif what == "begin":
            plain.meters.append((storages.begin_meter(), [storages.bytes]))
        elif what == "end" and plain.meters:
            meter, peak = plain.meters.pop(number % len(plain.meters))
            storages.end_meter(meter)
            assert meter.peak_bytes == peak[0]
        elif what == "reset":
            storages.reset_peak()
            plain.peak = storages.bytes
        assert storages.peak_bytes == plain.peak
        assert [meter.peak_bytes for meter, _ in plain.meters] == [
            peak[0] for _, peak in plain.meters
        ]


def test_short_lived_blocks_are_in_the_peak_and_events():
    storages = LiveStorages(keep_events=True)
    storages.bytes = 100
    with storages.passing([30, -500]), storages.passing([7]):
        assert storages.bytes == 137

    assert (storages.bytes, storages.peak_bytes) == (100, 137)
    assert storages.events == [(1, 30), (2, -500), (3, 7), (3, 0), (1, 0), (2, 0)]


def test_what_has_no_bytes_is_no_event():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    storages = LiveStorages(keep_events=True)
    empty, full = torch.empty(0), torch.empty(4)
    for tensor in (empty, full):
        storages.adopt(tensor)
    del empty, full, tensor

    assert storages.events == [(2, 16), (2, 0)]
