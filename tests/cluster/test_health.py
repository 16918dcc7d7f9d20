"""Health that sees a hang, with a server of vLLM in small under the real oomguard run (the real engine: tests/vllm/test_hangs.py)."""

from __future__ import annotations

import signal
import socket
import threading
import time

import psutil

from oomguard.cluster.health import Health, NoEngineAnswer, Server, ServerWatch
from oomguard.engines.server import ListenAddress, serving_names

VLLM = serving_names("vllm")
WATCHED = ("--hang-after", "2")
RESTARTED = (*WATCHED, "--restart", "on-failure")


def core_of(served) -> psutil.Process:
    below = psutil.Process(served.process.pid).children(recursive=True)
    return next(one for one in below if one.cmdline() and one.cmdline()[0] == "VLLM::EngineCore")


def test_stopped_scheduler_is_only_reported_by_default(serve):
    served = serve(*WATCHED)
    served.wait_for("the server answers")
    served.order("chunks")  # the request stays in the step
    request = served.request()
    time.sleep(0.3)
    served.order("stuck")
    hang = served.wait_for("the server hangs")
    assert "1 requests in a step, but no counter moved for" in hang["event"]
    assert hang["to_end_it"] == "add --restart on-failure"
    served.forget("chunks")
    served.forget("stuck")
    assert request.getresponse().status == 200
    served.wait_for("the server works again")
    assert served.starts() == 1
    assert len(served.told("the server hangs")) == 1
    assert served.end() == 0


def test_stuck_before_its_first_step_is_restarted_if_requested(serve):
    served = serve(*RESTARTED)
    served.wait_for("the server answers")
    served.order("stuck")
    served.request()
    hang = served.wait_for("the server hangs")
    assert "a request has waited for" in hang["event"]
    served.forget("stuck")
    again = served.wait_for("Running the command again unchanged")
    assert again["why"].startswith("the server hangs: a request has waited for")
    served.wait_for("the server answers", 2)
    assert served.request().getresponse().status == 200
    assert served.starts() == 2
    assert served.end() == 0


def test_half_a_request_and_an_idle_connection_are_no_hang(serve):
    served = serve(*RESTARTED)
    served.wait_for("the server answers")
    with (
        socket.create_connection(("127.0.0.1", served.port)) as half,
        socket.create_connection(("127.0.0.1", served.port)),
    ):
        half.send(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 50\r\n\r\n{")
        served.wait_for(
            "the engine works again"
        )  # one token was asked for, since the connection alone does not tell
        time.sleep(1)
    assert not served.told("the server hangs")
    assert served.end() == 0


def test_server_without_its_core_is_always_ended(serve):
    served = serve(*WATCHED)
    served.wait_for("the server answers")
    served.order("dead")
    served.wait_for("the engine is gone")
    assert served.process.wait(60) == 1
    assert served.starts() == 1


def test_a_stop_of_the_user_while_it_hangs_is_a_stop(serve):
    served = serve(*WATCHED)
    served.wait_for("the server answers")
    core_of(served).send_signal(signal.SIGSTOP)
    served.wait_for("the server hangs")
    assert served.end() == 0
    assert served.starts() == 1
    assert not served.told("Running the command again")


def test_whatever_goes_wrong_with_a_question_is_an_answer(monkeypatch):
    def breaks(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Server, "ask", breaks)
    looked = ServerWatch(
        Health("vllm", 2.0, lambda _: None, {}),
        Server(ListenAddress("127.0.0.1", 1)),
        VLLM,
        0,
        threading.Event(),
        counts_nothing=False,
    )
    assert looked._asked(5.0) == NoEngineAnswer("RuntimeError: broken")
