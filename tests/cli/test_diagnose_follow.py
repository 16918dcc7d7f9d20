"""``diagnose --follow`` as a person runs it: a real process, a real file that grows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import IO

import pytest

LIMIT_S = 200  # what a machine under load may take
LOGS = Path(__file__).parents[2] / "examples" / "logs"
KV = (LOGS / "vllm_serve_kv_cache.log").read_bytes()
LOW = (LOGS / "vllm_script_utilization_too_low.log").read_bytes()


class Followed:
    """A running ``diagnose --follow`` whose lines can be waited for."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self._lines, self._errors = process, Queue(), Queue()
        pipes = ((process.stdout, self._lines), (process.stderr, self._errors))
        self._readers = [threading.Thread(target=self._read, args=pipe) for pipe in pipes]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(pipe: IO[bytes], lines: Queue[bytes]) -> None:
        for line in pipe:
            lines.put(line)

    def next(self) -> dict:
        return json.loads(self._lines.get(timeout=LIMIT_S))

    def said(self) -> str:
        """The next line on standard error, without the file's name."""
        return self._errors.get(timeout=LIMIT_S).decode().rstrip("\n").split(": ", 2)[2]

    def nothing_for(self, seconds: float) -> bool:
        try:
            self._lines.get(timeout=seconds)
        except Empty:
            return True
        return False

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=LIMIT_S)
        for reader in self._readers:
            reader.join()
        return self.process.returncode, b"".join(self._errors.queue).decode()


@contextmanager
def followed(*arguments: str) -> Iterator[Followed]:
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "diagnose",
        "--follow",
        "--format",
        "json",
        *arguments,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield Followed(process)
        finally:
            process.kill()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_each_incident_is_told_once_when_its_message_is_whole(tmp_path):
    path = tmp_path / "engine.log"
    path.write_bytes(KV)
    with followed(str(path)) as running:
        first = running.next()
        assert [incident["kind"] for incident in first["incidents"]] == [
            "kv_cache_too_small_for_max_len"
        ]
        append(path, b"INFO another line\n")
        assert running.nothing_for(2.0)
        append(path, LOW)
        second = running.next()
        assert [incident["kind"] for incident in second["incidents"]] == ["cpu_node_memory"]
        assert second["source"] == str(path)
        assert running.stop() == (0, "")


def test_message_without_a_line_end_is_reported_after_a_second(tmp_path):
    path = tmp_path / "engine.log"
    path.write_bytes(KV[: KV.index(b"estimated maximum model length is 1792") + 60])
    with followed(str(path)) as running:
        assert running.next()["incidents"][0]["facts"]["estimated_max_model_len_tokens"] == 1792


def test_late_cut_and_replaced_file_is_followed(tmp_path):
    path = tmp_path / "engine.log"
    with followed("--exit-code", str(path)) as running:
        assert running.said() == "the file does not exist yet"
        path.write_bytes(b"INFO first\n" * 400 + KV)
        assert running.next()["verdict"] == "oom"
        path.write_bytes(KV)
        assert running.said() == "the file was truncated; oomguard continues at its new start"
        assert running.next()["verdict"] == "oom"
        path.rename(tmp_path / "engine.log.1")
        path.write_bytes(KV)
        assert (
            running.said()
            == "another file replaced it; oomguard continues at the start of that file"
        )
        assert running.next()["verdict"] == "oom"
        assert running.stop() == (1, "")


def test_standard_input_is_followed_to_its_end():
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "diagnose",
        "--follow",
        "--exit-code",
        "--format",
        "json",
    ]
    ran = subprocess.run(command, input=KV, capture_output=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 1
    assert json.loads(ran.stdout)["source"] == "-"


def test_powershells_utf16_is_followed(tmp_path):
    path = tmp_path / "engine.log"
    path.write_bytes(KV.decode().encode("utf-16"))
    with followed(str(path)) as running:
        assert running.next()["verdict"] == "oom"


def test_a_fifo_is_followed_to_its_end(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with followed(str(path)) as running:
        path.write_bytes(KV)
        assert running.next()["verdict"] == "oom"
        assert running.process.wait(timeout=LIMIT_S) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "html", "a.log"], "--follow cannot write HTML"),
        (["."], "oomguard cannot follow a folder"),
    ],
)
def test_what_cannot_be_followed_is_one_message_and_status_2(tmp_path, arguments, words):
    command = [sys.executable, "-m", "oomguard", "diagnose", "--follow", *arguments]
    ran = subprocess.run(
        command, capture_output=True, timeout=LIMIT_S, check=False, cwd=tmp_path, text=True
    )
    assert ran.returncode == 2
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr


NEW_WORDS = b"ERROR inference.arena: grow refused: out of device memory, accelerator 0\n"


def test_new_words_are_reported_once_the_log_is_quiet(tmp_path):
    path = tmp_path / "engine.log"
    path.write_bytes(b"INFO arena: 40.00 GiB reserved\n" + NEW_WORDS)
    with followed(str(path)) as running:
        told = running.next()["incidents"]
        assert [(one["kind"], one["certainty"]) for one in told] == [("cuda_oom", 0.8)]
        append(path, b"INFO closing\n" + NEW_WORDS)
        assert running.nothing_for(2.5)


def test_a_known_wording_behind_new_words_is_told_alone(tmp_path):
    path = tmp_path / "engine.log"
    path.write_bytes(NEW_WORDS + KV)
    with followed(str(path)) as running:
        assert [one["kind"] for one in running.next()["incidents"]] == [
            "kv_cache_too_small_for_max_len"
        ]
        assert running.nothing_for(1.5)
