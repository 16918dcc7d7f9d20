"""What the kernel tells of requests that wait at a port, on real sockets."""

from __future__ import annotations

import socket
import time

import pytest

from oomguard.cluster.health import request_waits_s


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request: pytest.FixtureRequest):
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with (
        socket.create_server((request.param, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as client,
        server.accept()[0] as accepted,
    ):
        yield server.getsockname()[1], client, accepted


def test_a_connection_without_a_byte_waits_for_nothing(pair):
    port, _, _ = pair
    time.sleep(0.05)
    assert request_waits_s(port) == ()


def test_request_waits_from_its_last_byte_to_the_first_answer(pair):
    port, client, accepted = pair
    client.send(b"GET")
    time.sleep(0.3)
    (waits,) = request_waits_s(port)
    assert 0.2 < waits < 5
    accepted.send(b"200")
    time.sleep(0.02)
    assert request_waits_s(port) == ()
    time.sleep(0.05)
    client.send(b"GET")
    time.sleep(0.02)
    assert len(request_waits_s(port)) == 1


def test_connections_of_other_ports_do_not_count(pair):
    port, client, _ = pair
    client.send(b"GET")
    time.sleep(0.05)
    assert request_waits_s(client.getsockname()[1]) == ()
    assert request_waits_s(port + 1 if port < 65535 else port - 1) == ()
