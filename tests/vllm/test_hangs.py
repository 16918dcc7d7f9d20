"""The real vLLM, stuck: found though /health answers 200, ended, and started again."""

from __future__ import annotations

import signal
import time
import urllib.request

from support.tiny_engine import make_tiny
from support.watched_server import watched_server

LIMIT_S = 8


def test_stopped_scheduler_is_found_and_the_server_recovers(vllm_env, tmp_path):
    make_tiny(tmp_path)
    with watched_server(tmp_path, LIMIT_S) as server:
        assert server.answers()
        (server.orders / "stuck").touch()
        server.load(10)
        time.sleep(1)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=10) as health:
            assert health.status == 200  # the front answers, whatever its engine does
        assert server.wait_for("the server hangs", 1, 60)
        (server.orders / "stuck").unlink()
        assert server.wait_for("Running the command again unchanged", 1, 60)
        assert server.answers()
        server.core().send_signal(signal.SIGKILL)
        assert server.wait_for("Running the command again unchanged", 2, 120)
    assert [event["why"] for event in server.told("Running the command again unchanged")][
        1
    ] == "the engine died, exit status 0"
