"""What a kubelet is answered, with a server of vLLM in small under the real oomguard run."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys

from support.supervising import RUN, wait_for


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def asked(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except ConnectionError as error:
        return 0, str(error)
    finally:
        connection.close()


def port_of(served) -> int:
    return int(served.wait_for("Answering probes")["port"])


def test_server_is_ready_when_it_answers_and_alive_at_once(serve):
    served = serve("--probes", "0", flags=("--mode", "slow start"))
    port = port_of(served)
    assert asked(port, "/livez") == (200, "ok\n")
    assert asked(port, "/readyz")[0] == 503
    served.wait_for("the server answers")
    assert wait_for(lambda: asked(port, "/readyz") == (200, "ok\n"), 20)
    assert served.end() == 0


def test_a_hang_is_neither_alive_nor_ready_and_says_why(serve):
    served = serve("--probes", "127.0.0.1:0", "--hang-after", "2")
    port = port_of(served)
    served.wait_for("the server answers")
    served.order("stuck")
    served.request()
    served.wait_for("the server hangs")
    for path in ("/livez", "/readyz"):
        status, text = asked(port, path)
        assert status == 503
        assert text.startswith("the server hangs: a request has waited for")
    served.forget("stuck")
    served.wait_for("the server works again")
    assert asked(port, "/livez")[0] == asked(port, "/readyz")[0] == 200
    assert served.end() == 0


def test_a_command_that_is_no_server_is_ready_while_it_runs():
    port = free_port()
    words = [
        *RUN,
        "--probes",
        str(port),
        "--",
        sys.executable,
        "-c",
        "import sys; sys.stdin.read()",
    ]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as run:
        assert wait_for(lambda: asked(port, "/readyz") == (200, "ok\n"), 40)
        assert asked(port, "/livez/") == (200, "ok\n")
        assert asked(port, "/readyz?verbose", "HEAD") == (200, "")
        assert asked(port, "/healthz") == (404, "/livez or /readyz\n")
        run.stdin.close()
        assert run.wait(40) == 0


def test_what_is_no_port_is_a_mistake():
    text = "127.0.0.1"
    ran = subprocess.run(
        [*RUN, "--probes", text, "--", "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 2
    assert f"--probes {text} is not a port or an address" in ran.stderr


def test_events_name_the_port_that_was_taken():
    words = [*RUN, "--probes", "0", "--log-format", "json", "--", "true"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    (event,) = [json.loads(line) for line in ran.stderr.splitlines()]
    assert (event["event"], event["path"]) == ("Answering probes", "/livez")
