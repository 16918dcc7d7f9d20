"""Graphs that fit: as many of the smallest as were captured of the largest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Incident
from oomguard.remedy.from_log import graphs_that_were_captured


def incident(**facts) -> Incident:
    return Incident(
        "cudagraph_capture_oom",
        "boom",
        facts={name: Fact(name, value) for name, value in facts.items()},
    )


def test_as_many_of_the_smallest_are_left_as_were_captured():
    found = graphs_that_were_captured(
        incident(
            graph_sizes="1, 2, 4, 8, 16, 24",
            graphs_captured=4,
            graphs_wanted=6,
            graphs_free_bytes=2 * GIB,
        )
    )

    assert found.value == 8
    assert "4 of 6 graphs were captured in 2.00 GiB" in found.reason


def test_where_the_first_one_fails_no_size_is_told():
    assert (
        graphs_that_were_captured(
            incident(graph_sizes="1, 2", graphs_captured=0, graphs_wanted=2)
        ).value
        is None
    )


def test_sizes_of_another_list_tell_nothing():
    found = graphs_that_were_captured(
        incident(graph_sizes="1, 2, 4", graphs_captured=2, graphs_wanted=58)
    )

    assert found.value is None
    assert found.unknown == ("the sizes and how many of them were captured: not printed",)


@given(st.sets(st.integers(1, 512), min_size=2, max_size=60).map(sorted), st.data())
def test_what_is_left_needs_no_more_than_what_was_captured(sizes, data):
    done = data.draw(st.integers(1, len(sizes) - 1))

    found = graphs_that_were_captured(
        incident(graph_sizes=", ".join(map(str, sizes)), graphs_captured=done)
    )

    left = [size for size in sizes if size <= found.value]
    captured = sizes[::-1][:done]
    assert len(left) == done
    assert all(small <= large for small, large in zip(left[::-1], captured, strict=True))
