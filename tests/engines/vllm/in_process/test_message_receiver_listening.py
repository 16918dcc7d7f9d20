"""What vLLM's processes tell the start that made them: through a socket of its own, bounded, and never in an engine's way."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from oomguard.engines.vllm.in_process import message_sender, start
from oomguard.engines.vllm.in_process.message_receiver import MessageReceiver
from oomguard.engines.vllm.plugin import LISTENER

SPEAKS = """
import logging, sys
from oomguard.engines.vllm.plugin import register
register()
{}
"""


@pytest.fixture
def listener() -> Iterator[MessageReceiver]:
    made = MessageReceiver()
    made.open()
    yield made
    message_sender.stop_sending()
    made.close()


def child(code: str, listener: MessageReceiver, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in another process that loads the plugin as vLLM's do."""
    env = {**os.environ, LISTENER: str(listener.path), **env}
    return subprocess.run(
        [sys.executable, "-c", SPEAKS.format(code)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_logged_error_of_another_process_has_its_traceback(listener):
    code = "try:\n  raise ValueError('no room')\nexcept ValueError:\n  logging.getLogger('vllm.core').exception('failed')"
    assert child(code, listener).returncode == 0
    listener.settle()
    hello, row = listener.rows()
    assert hello["hello"] == os.getpid()
    assert (row["level"], row["text"]) == ("ERROR", "failed")
    assert row["traceback"].endswith("ValueError: no room\n")
    assert list(listener.senders) == [row["pid"]] == [hello["pid"]]


def test_what_was_said_before_a_kill_has_arrived(listener):
    code = "logging.getLogger('vllm').warning('the last word')\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    assert child(code, listener).returncode == -9
    listener.settle()
    assert listener.rows()[-1]["text"] == "the last word"


def test_records_of_other_loggers_and_details_are_not_told(listener):
    code = "logging.getLogger('torch').error('x')\nlogging.getLogger('vllmx').error('x')\nlogging.getLogger('vllm').debug('x')"
    assert child(code, listener).returncode == 0
    listener.settle()
    assert [row for row in listener.rows() if "text" in row] == []


def test_forked_process_logs_for_itself_after_reconfiguration(listener):
    code = """
import os, logging.config
pid = os.fork()
if pid == 0:
    logging.config.dictConfig({"version": 1, "loggers": {"vllm": {"level": "INFO", "handlers": []}}})
    logging.getLogger("vllm").error("from the fork")
    os._exit(0)
os.waitpid(pid, 0)
"""
    assert child(code, listener).returncode == 0
    listener.settle()
    parent, fork = listener.rows()
    assert fork["text"] == "from the fork"
    assert fork["pid"] != parent["pid"]
    assert set(listener.senders) == {fork["pid"], parent["pid"]}


def test_nested_vllm_log_factory_reports_a_record_once(listener):
    code = """
class Own:
    def __init__(self, factory): self._factory = factory
    def __call__(self, *a, **k): return self._factory(*a, **k)
logging.setLogRecordFactory(Own(logging.getLogRecordFactory()))
register()
from oomguard.engines.vllm.in_process import message_sender as speaking
speaking._sender.is_over = True
register()
logging.getLogger("vllm").error("once")
"""
    assert child(code, listener).returncode == 0
    listener.settle()
    assert [row["text"] for row in listener.rows() if "text" in row] == ["once"]


def test_the_name_of_each_shared_segment_that_is_made_is_told(listener):
    code = "from multiprocessing.shared_memory import SharedMemory as S\ns = S(create=True, size=16)\nS(s.name).close()\ns.close()\ns.unlink()\nprint(s.name)"
    made = child(code, listener).stdout.strip()
    listener.settle()
    assert [row["segment"] for row in listener.rows() if "segment" in row] == [made]


def test_semaphore_name_of_a_killed_process_is_reported(listener, monkeypatch):
    monkeypatch.setattr(
        start, "_forget", lambda _name: None
    )  # the tracker of this process never knew it
    code = """
import multiprocessing, os, signal
lock = multiprocessing.get_context("spawn").Lock()
os.kill(multiprocessing.resource_tracker._resource_tracker._pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert child(code, listener).returncode == -9
    listener.settle()
    (name,) = [row["segment"] for row in listener.rows() if "segment" in row]
    assert Path("/dev/shm", name).exists()
    assert start.remove_segments([name]) == (name,)
    assert not Path("/dev/shm", name).exists()


def test_listening_process_reports_its_starting_threads_log(
    listener,
):
    factory, init = logging.getLogRecordFactory(), shared_memory.SharedMemory.__init__
    message_sender.mark_as_receiver()
    message_sender.start_sending(listener.path)
    logging.getLogger("vllm.config").warning("here")
    message_sender.stop_sending()
    logging.getLogger("vllm.config").warning("not any more")
    listener.settle()
    (row,) = [row for row in listener.rows() if "text" in row]
    assert (row["text"], row["process"]) == ("here", "")
    assert listener.senders == {}
    assert logging.getLogRecordFactory() is factory
    assert shared_memory.SharedMemory.__init__ is init


def test_a_listener_that_is_not_there_does_not_touch_the_engine(subtests, tmp_path):
    for path in ["/nowhere/at/all", "", "x" * 5000, "\0"]:
        with subtests.test(path=path):
            code = SPEAKS.format("logging.getLogger('vllm').error('x'); print('on')")
            env = {**os.environ, LISTENER: path.replace("\0", str(tmp_path))}
            ran = subprocess.run(
                [sys.executable, "-c", code],
                env=env,
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            assert (ran.stdout, ran.stderr) == ("on\n", "x\n")


def test_stuck_listener_delays_an_engine_only_briefly(tmp_path):
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "s"))
        deaf.listen()
        began_s = time.monotonic()
        code = SPEAKS.format("for _ in range(200): logging.getLogger('vllm').error('x' * 30000)")
        env = {**os.environ, LISTENER: str(tmp_path / "s")}
        subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, timeout=60, check=True
        )
        assert time.monotonic() - began_s < 20


def test_process_that_outlives_the_start_is_informed(listener):
    code = """
import sys
logging.getLogger("vllm").error("heard")
print(flush=True)
sys.stdin.readline()
logging.getLogger("vllm").error("not heard")
logging.getLogger("vllm").error("not heard")
from oomguard.engines.vllm.in_process import message_sender as speaking
print(speaking._sender.is_over)
"""
    env = {**os.environ, LISTENER: str(listener.path)}
    with subprocess.Popen(
        [sys.executable, "-c", SPEAKS.format(code)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        folder = Path(str(listener.path)).parent
        listener.close()
        assert not folder.exists()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "True\n"
    assert [row["text"] for row in listener.rows() if "text" in row] == ["heard"]


def test_what_is_kept_has_the_beginning_and_the_end(listener):
    with socket.socket(socket.AF_UNIX) as talker:
        talker.connect(str(listener.path))
        for number in range(0, 10_000, 100):
            rows = "".join(json.dumps({"text": str(n)}) + "\n" for n in range(number, number + 100))
            talker.sendall(rows.encode() + b"no json\n[1]\n")
    listener.settle()
    texts = [row["text"] for row in listener.rows()]
    assert len(texts) == 4000
    assert (texts[0], texts[1999], texts[-1]) == ("0", "1999", "9999")


def test_a_row_without_an_end_is_cut_off(listener):
    with socket.socket(socket.AF_UNIX) as talker:
        talker.connect(str(listener.path))
        with contextlib.suppress(OSError):
            for _ in range(100):
                talker.sendall(b"x" * 65536)
    listener.settle()
    assert listener.rows() == []


def test_missing_folder_is_reported_and_no_listener_starts(subtests, tmp_path, monkeypatch):
    for where in ["missing", "file"]:
        with subtests.test(where=where), monkeypatch.context() as changed:
            (tmp_path / "file").write_text("")
            changed.setattr(tempfile, "tempdir", str(tmp_path / where))
            listener = MessageReceiver()
            listener.open()
            assert listener.path is None
            assert listener.problem
            listener.settle()
            listener.close()
            assert listener.rows() == []


def test_a_folder_with_a_long_name_is_listened_in(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 200)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    listener = MessageReceiver()
    listener.open()
    assert child("logging.getLogger('vllm').error('far')", listener).returncode == 0
    listener.settle()
    assert listener.rows()[-1]["text"] == "far"
    listener.close()
    assert list(long.iterdir()) == []


def test_late_listener_still_hears_earlier_messages(tmp_path, monkeypatch):
    listener = MessageReceiver()
    late = threading.Event()
    take = MessageReceiver._take

    def slow(
        self: MessageReceiver, selector: selectors.BaseSelector, timeout_s: float | None
    ) -> bool:
        late.wait(30)
        return take(self, selector, timeout_s)

    monkeypatch.setattr(MessageReceiver, "_take", slow)
    listener.open()
    assert child("logging.getLogger('vllm').error('in time')", listener).returncode == 0
    closing = threading.Thread(target=listener.close)
    closing.start()
    late.set()
    closing.join(30)
    assert listener.rows()[-1]["text"] == "in time"
