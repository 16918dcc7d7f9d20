"""The room of a failed call: the device's size, less what others hold, and a memory fraction's cap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Incident
from oomguard.remedy.failed_call import device_room_bytes

SIZES = st.integers(min_value=1 << 20, max_value=1 << 40)


def incident(**values):
    return Incident(
        "cuda_oom", "out of memory", facts={n: Fact(n, v, "printed") for n, v in values.items()}
    )


def test_unknown_size_or_life_means_nothing_is_known():
    assert device_room_bytes(incident(), 0, 0.0) is None
    assert device_room_bytes(incident(device_total_bytes=GIB), None, 0.0) is None


@given(total=SIZES, others=st.integers(0, 1 << 30), base=st.integers(0, 1 << 30))
def test_what_others_and_we_hold_is_taken_off(total, others, base):
    found = device_room_bytes(
        incident(device_total_bytes=total, other_process_in_use_bytes=others), base, 0.0
    )
    assert found == total - others - base


@given(total=SIZES, allowed=SIZES, margin=st.floats(0, 0.1))
def test_a_cap_is_never_passed_and_never_makes_room(total, allowed, margin):
    free = device_room_bytes(incident(device_total_bytes=total), 0, margin)
    capped = device_room_bytes(incident(device_total_bytes=total, allowed_bytes=allowed), 0, margin)
    assert capped <= min(free, allowed)
