"""Ranks that see no common folder meet in a store: torch's, which rank 0 keeps where no launcher does."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from oomguard.cluster.ranks.rendezvous import RankIdentity, free_port, rendezvous
from oomguard.core.errors import UsageError
from support.each import each
from support.supervising import LIMIT_S


def test_ranks_of_two_hosts_agree_through_torchs_store(job):
    pytest.importorskip("torch")
    job.start(2, rendezvous=f"tcp://127.0.0.1:{free_port()}", are_apart=True, fits={"1": 1792})
    ended = job.ended()
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert job.lengths() == [[32768, 1792]] * 2
    assert "note: first: rank 1" in ended[0][2]


def test_unreachable_store_prevents_a_joint_relaunch(job):
    of_all = {"fits": {"0": 1792}, "modes": {"1": "early"}}
    job.start(2, "--rank-timeout", "4s", rendezvous="ray://127.0.0.1:1", are_apart=True, **of_all)
    _, errors = job.ranks[0].communicate(timeout=LIMIT_S)
    assert job.ranks[0].returncode == 1
    assert "Rank 1 is silent: no rank restarts: mirror=" in errors
    assert job.lengths()[0] == [32768]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another program has."""
    with socket.create_server(("", 0)) as other:
        yield other.getsockname()[1]


def test_rank_0_names_the_taken_port_and_what_to_do(job, taken):
    pytest.importorskip("torch")
    job.start(
        1, "--world-size", "2", rendezvous=f"tcp://127.0.0.1:{taken}", are_apart=True, after_s="300"
    )
    errors = job.ranks[0].stderr
    assert errors is not None
    said = next(line for line in errors if "not met yet" in line)
    assert said.startswith(
        'oomguard: Rank 1 is not met yet, and no rank restarts without the others: reason="the torch store at 127.0.0.1:'
    )
    assert "another program uses the port; choose a free one" in said
    assert job.ranks[0].poll() is None


def test_ranks_with_a_dead_store_on_one_host_restart_and_say_so(job):
    """What was said before they met is no untruth after it."""
    place = f"ray://127.0.0.1:{free_port()}"
    job.start(3, rendezvous=place, fits={"2": 1792})
    ended = job.ended()
    assert [status for status, _, _ in ended] == [0] * 3, ended
    why = f'reason="the ray store at {place.removeprefix("ray://")} was not reached: Connection refused'
    assert f"All ranks are on this host and meet there without their store: {why}" in ended[0][2]
    assert not any(
        "no rank restarts automatically" in errors or "no rank restarts:" in errors
        for _, _, errors in ended
    )


def test_ranks_that_meet_at_another_address_are_of_another_job():
    places = [rendezvous(of_two_hosts(), f"tcp://node-1:{port}").folder for port in (1, 2)]
    assert places[0] != places[1]


def of_two_hosts(**told: object) -> RankIdentity:
    return RankIdentity(
        **{
            "rank": 1,
            "size": 2,
            "launcher": "torchrun",
            "job": "a",
            "address": "node-1",
            "port": 29500,
        }
        | told
    )


def test_ranks_of_one_host_need_no_store():
    assert rendezvous(of_two_hosts(local_rank=1, local_size=2), None).store is None


def test_the_launchers_own_store_is_taken_where_it_keeps_one():
    store = rendezvous(of_two_hosts(keeps_store=True), None).store
    assert (store.kind, store.port, store.is_kept_by_rank_0) == ("torch", 29500, False)


def test_else_rank_0_keeps_one_beside_its_port():
    store = rendezvous(of_two_hosts(), None).store
    assert (store.address, store.port, store.is_kept_by_rank_0) == ("node-1", 29501, True)


def test_one_rank_a_host_mirrors():
    ranks = [
        rendezvous(of_two_hosts(size=4, local_rank=local, local_size=2), None) for local in (0, 1)
    ]
    assert [rank.mirrors for rank in ranks] == [True, False]
    assert ranks[0].folder == ranks[1].folder


@each(
    "asked",
    ["tcp://", "tcp://host", "http://host:1", "tcp://host:port", "ray://host", "s3://bucket/x"],
)
def test_what_names_no_place_is_refused(asked):
    with pytest.raises(UsageError, match="is invalid"):
        rendezvous(of_two_hosts(), asked)


def test_a_launcher_that_tells_no_address_stops_no_command():
    found = rendezvous(of_two_hosts(address=None), None)
    assert found.problem.startswith("torchrun does not set a meeting place: --rendezvous names")
