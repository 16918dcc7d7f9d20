"""Health that sees a hang, with a server of vLLM in small under the real oomguard run (the real engine: tests/vllm/test_hangs.py)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from oomguard.engines.listening import Address
from oomguard.engines.serving import serving_names
from oomguard.serving.asking import Server
from oomguard.serving.health import Health
from oomguard.serving.looking import Elsewhere, LookedAt

VLLM = serving_names("vllm")
WATCHED = ("--hang-after", "2")
RESTARTED = (*WATCHED, "--restart", "on-failure")


def core_of(served) -> psutil.Process:
    below = psutil.Process(served.process.pid).children(recursive=True)
    return next(one for one in below if one.cmdline() and one.cmdline()[0] == "VLLM::EngineCore")


def test_a_scheduler_that_stops_is_told_by_default_and_nothing_is_ended(serve):
    served = serve(*WATCHED)
    served.wait_for("the server answers")
    served.order("chunks")  # the request stays in the step
    request = served.request()
    time.sleep(0.3)
    served.order("stuck")
    hang = served.wait_for("the server hangs")
    assert "1 requests in a step, and no counter moved for" in hang["event"]
    assert hang["to_end_it"] == "give --restart on-failure"
    served.forget("chunks")
    served.forget("stuck")
    assert request.getresponse().status == 200
    served.wait_for("the server goes on")
    assert served.starts() == 1
    assert len(served.told("the server hangs")) == 1
    assert served.end() == 0


def test_stuck_before_its_first_step_it_is_ended_and_started_again_where_that_is_asked_for(serve):
    served = serve(*RESTARTED)
    served.wait_for("the server answers")
    served.order("stuck")
    served.request()
    hang = served.wait_for("the server hangs")
    assert "a request has waited for" in hang["event"]
    served.forget("stuck")
    again = served.wait_for("running again as it was")
    assert again["why"].startswith("the server hangs: a request has waited for")
    served.wait_for("the server answers", 2)
    assert served.request().getresponse().status == 200
    assert served.starts() == 2
    assert served.end() == 0


def test_chunks_of_a_long_prompt_count_no_token_and_are_no_hang(serve):
    served = serve(*RESTARTED)
    served.wait_for("the server answers")
    served.order("chunks")
    request = served.request()
    time.sleep(7)
    served.forget("chunks")
    assert request.getresponse().status == 200  # it got its answer
    assert not served.told("the server hangs")
    assert served.end() == 0


def test_half_a_request_and_an_idle_connection_are_no_hang(serve):
    served = serve(*RESTARTED)
    served.wait_for("the server answers")
    with (
        socket.create_connection(("127.0.0.1", served.port)) as half,
        socket.create_connection(("127.0.0.1", served.port)),
    ):
        half.send(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 50\r\n\r\n{")
        served.wait_for("the engine goes on")  # one token was asked for, since the connection alone does not tell
        time.sleep(1)
    assert not served.told("the server hangs")
    assert served.end() == 0


def test_a_core_that_a_signal_stopped_is_found_while_health_answers_200(serve):
    served = serve(*RESTARTED)
    served.wait_for("the server answers")
    core_of(served).send_signal(signal.SIGSTOP)
    assert "a signal stopped its engine core" in served.wait_for("the server hangs")["event"]
    served.wait_for("the server answers", 2)
    assert served.end() == 0


def test_a_server_that_lives_on_without_its_core_is_ended_in_any_case(serve):
    served = serve(*WATCHED)
    served.wait_for("the server answers")
    served.order("dead")
    served.wait_for("the engine is gone")
    assert served.process.wait(60) == 1
    assert served.starts() == 1


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--disable-log-stats",), "--disable-log-stats leaves /metrics without the engine's counters"),
        (("--mode", "other metrics"), "/metrics has no counters of this engine"),
        (("--mode", "no metrics"), "/metrics answers 404"),
    ],
    ids=["no counters", "other metrics", "no metrics"],
)
def test_without_counters_it_is_said_once_and_the_waiting_request_tells(serve, flags, why):
    served = serve(*RESTARTED, flags=flags)
    served.wait_for("the server answers")
    assert why in served.wait_for("may not be seen")["event"]
    served.order("stuck")
    served.request()
    assert "nothing is counted; its processes are idle for" in served.wait_for("the server hangs")["event"]
    assert len(served.told("may not be seen")) == 1
    served.forget("stuck")
    served.wait_for("running again as it was")


def test_with_a_key_the_request_that_decides_carries_it(serve):
    served = serve(*RESTARTED, flags=("--api-key", "sk-1"))
    served.wait_for("the server answers")
    with socket.create_connection(("127.0.0.1", served.port)) as half:
        half.send(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 50\r\n\r\n{")
        served.wait_for("the engine goes on")
    assert "sk-1" not in (served.folder / "errors").read_text()


def test_over_tls_it_is_watched_as_well(serve, tmp_path):
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            "/CN=x",
            "-keyout",
            "key",
            "-out",
            "cert",
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    served = serve(*RESTARTED, flags=("--ssl-certfile", str(tmp_path / "cert"), "--ssl-keyfile", str(tmp_path / "key")))
    served.wait_for("the server answers")
    core_of(served).send_signal(signal.SIGSTOP)
    served.wait_for("the server hangs")
    served.end()


def test_on_a_unix_socket_it_is_watched_as_well(serve):
    path = Path("/tmp") / f"oomguard-test-{os.getpid()}-{time.monotonic_ns()}.sock"
    try:
        served = serve(*RESTARTED, flags=("--uds", str(path)))
        served.wait_for("the server answers")
        core_of(served).send_signal(signal.SIGSTOP)
        served.wait_for("the server hangs")
        served.end()
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("status", [200, 404])
def test_another_server_at_its_address_is_said_once_and_the_run_goes_on(serve, status):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    other = HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        flags = ("--host", "0.0.0.0", "--port", str(other.server_port), "--mode", "binds nothing")
        served = serve(flags=flags)
        told = served.wait_for("may not be seen")
        assert told["event"].endswith("another server answers at its address")
        assert told["level"] == "warning"  # also without -v
        assert (told["address"], told["pids"]) == (f"127.0.0.1:{other.server_port}", [os.getpid()])
        time.sleep(1)
        assert len(served.told("may not be seen")) == 1
        assert served.end() == 0
    finally:
        other.shutdown()
        other.server_close()


def test_off_it_looks_at_nothing(serve):
    served = serve("--hang-after", "0")
    served.wait_for("the server answers")
    core_of(served).send_signal(signal.SIGSTOP)
    time.sleep(3)
    assert not served.told("the server hangs")
    core_of(served).send_signal(signal.SIGCONT)
    served.end()


def test_a_stop_of_the_user_while_it_hangs_is_a_stop(serve):
    served = serve(*WATCHED)
    served.wait_for("the server answers")
    core_of(served).send_signal(signal.SIGSTOP)
    served.wait_for("the server hangs")
    assert served.end() == 0
    assert served.starts() == 1
    assert not served.told("running again")


def test_what_moves_while_the_server_is_being_stopped_is_no_server_that_goes_on(capsys):
    stopped = []
    health = Health("vllm", 2, lambda _over: None, {}, is_stopped=lambda: bool(stopped), wrong="the server hangs")
    stopped.append("by the user")
    health.goes_on()
    assert "goes on" not in capsys.readouterr().err
    assert health.wrong == "the server hangs"
    stopped.clear()
    health.goes_on()
    assert health.wrong is None


def test_a_file_that_may_hold_the_port_is_said_once(serve, tmp_path):
    served = serve(*RESTARTED, flags=("--config", str(tmp_path / "c.yaml")))
    told = served.wait_for("may not be seen")
    assert told["event"].endswith("its address is not known from its command")
    assert told["hint"] == "give --host and --port"
    served.end()


OTHER_ANSWERS = ["", "{}", "<html>", '{"data": []}', '{"data": [1]}', '{"data": {"id": 1}}', "[" * 100_000]


@pytest.mark.parametrize(
    "answer", OTHER_ANSWERS, ids=["empty", "object", "html", "no model", "number", "no list", "deep"]
)
def test_a_list_of_models_that_is_none_is_said_in_one_line_and_the_counters_decide(serve, answer):
    served = serve(*WATCHED, flags=("--models", answer))
    served.wait_for("the server answers")
    served.order("chunks")
    served.request()
    time.sleep(0.3)
    served.order("stuck")
    assert "no counter moved" in served.wait_for("the server hangs")["event"]
    (said,) = served.told("it takes no request that tells")
    assert said["reason"] == "/v1/models names no model"
    assert "Traceback" not in (served.folder / "errors").read_text()
    served.end()


def test_an_answer_that_no_engine_gives_does_not_say_that_the_engine_goes_on(serve):
    served = serve(*RESTARTED, flags=("--completion", "<html>busy</html>"))
    served.wait_for("the server answers")
    served.order("stuck")
    looked = LookedAt(
        Health("vllm", 2.0, lambda _: None, {}),
        Server(Address("127.0.0.1", served.port)),
        VLLM,
        0,
        threading.Event(),
        counts_nothing=False,
    )
    assert looked._asked(5.0) == Elsewhere("/v1/completions answers something else than an engine does")
    served.end()


def test_whatever_goes_wrong_with_a_question_is_an_answer(monkeypatch):
    def breaks(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Server, "ask", breaks)
    looked = LookedAt(
        Health("vllm", 2.0, lambda _: None, {}),
        Server(Address("127.0.0.1", 1)),
        VLLM,
        0,
        threading.Event(),
        counts_nothing=False,
    )
    assert looked._asked(5.0) == Elsewhere("RuntimeError: broken")
