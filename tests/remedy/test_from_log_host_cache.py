"""A host cache is sized to what the host has free: its ranks together, what the engine keeps free, and some margin."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Incident
from oomguard.remedy.from_log import host_cache_within_free, host_ratio_within_free

sizes = st.integers(1, 2**45)


def incident(**values: float) -> Incident:
    return Incident(
        "host_oom", "", facts={name: Fact(name, value) for name, value in values.items()}
    )


@given(sizes, sizes, st.integers(1, 16))
def test_all_ranks_together_stay_within_what_is_free(wanted, free, ranks):
    solution = host_cache_within_free(
        incident(tried_bytes=wanted, host_available_bytes=free, tensor_parallel_size=ranks)
    )

    if solution.value is not None:
        assert ranks * solution.value * 10**9 <= (free - 10 * GIB if free >= wanted else free)
        assert solution.value >= 1


def test_an_old_message_gives_what_is_free_without_what_is_kept():
    now, old = (
        host_cache_within_free(incident(tried_bytes=wanted, host_available_bytes=45 * 10**9)).value
        for wanted in (60 * 10**9, 40 * 10**9)
    )

    assert (now, old) == (42, 32)


@given(sizes, sizes, st.floats(0.1, 8.0))
def test_a_lower_ratio_asks_for_no_more_than_is_free(wanted, free, ratio):
    solution = host_ratio_within_free(
        incident(tried_bytes=wanted, host_available_bytes=free, hicache_ratio=ratio)
    )

    if solution.value is not None:
        assert solution.value > 0
        assert solution.value / ratio * wanted <= (free - 10 * GIB if free >= wanted else free) + 1
