"""What waits on a machine for a shared journal: a call that has returned is kept, whatever becomes of its process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from oomguard.journal.codec import AttemptEnd, AttemptRow, RunIdentity
from oomguard.journal.outbox import (
    Outbox,
    abandoned_outboxes,
    attempts_in,
    delivered_of,
    note_delivered,
    read_from,
    record_in,
    waiting,
)
from oomguard.report.json import plain_value

RECORD = AttemptRow(
    "s",
    1,
    ["vllm", "serve", "ü\n\udc80"],
    {"max_model_len": 4096},
    [{"to": 1}],
    started_at=1.5,
    who="ann",
)
ENDED = AttemptEnd(
    3,
    {"kind": "cuda_oom"},
    {"x": 1},
    RunIdentity("vllm", "0.33.0"),
    {"max_model_len": True},
    2.5,
    "why",
    4.0,
)
WRITER = """
import os, signal, sys
from pathlib import Path
from oomguard.journal.codec import AttemptRow
from oomguard.journal.outbox import Outbox
outbox = Outbox(Path(sys.argv[1]), "killed")
for number in range(1, 4):
    outbox.begin(AttemptRow("killed", number, ["x"], {}, []))
os.kill(os.getpid(), signal.SIGKILL)
"""


def rows_left(folder: Path) -> list[dict[str, object]]:
    with abandoned_outboxes(folder) as files:
        return [row for _path, fd in files for row in read_from(fd, 0)[0]]


def test_records_are_read_back_as_written_within_json(tmp_path: Path):
    outbox = Outbox(tmp_path, "s")
    outbox.begin(RECORD)
    outbox.end(RECORD, ENDED)
    rows, end = read_from(outbox.fd, 0)
    outbox.close(is_delivered=False)

    begun, ended = map(record_in, rows)
    assert (begun.settings, begun.started_at, begun.who) == ({"max_model_len": 4096}, 1.5, "ann")
    assert begun.command == ["vllm", "serve", "ü\n�"]
    assert ended == ENDED
    assert (end, attempts_in(rows)) == (outbox.path.stat().st_size, 1)
    assert outbox.path.stat().st_mode & 0o077 == 0


def test_killed_writers_data_is_left_whole(tmp_path: Path):
    killed = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], check=False)

    assert killed.returncode == -9
    assert [row["number"] for row in rows_left(tmp_path)] == [1, 2, 3]


def test_a_file_whose_writer_lives_is_nobody_elses(tmp_path: Path):
    outbox = Outbox(tmp_path, "s")
    outbox.begin(RECORD)
    assert (rows_left(tmp_path), waiting(tmp_path)) == ([], [outbox.path])
    outbox.close(is_delivered=False)
    assert len(rows_left(tmp_path)) == 1


def test_file_removed_as_empty_is_recreated_for_its_writer(tmp_path: Path):
    (tmp_path / "s.jsonl").touch()
    with abandoned_outboxes(tmp_path) as files:
        path, _fd = next(files)
        path.unlink()
    outbox = Outbox(tmp_path, "s")
    outbox.begin(RECORD)
    assert outbox.path.stat().st_size > 0
    outbox.close(is_delivered=True)
    assert waiting(tmp_path) == []


@pytest.mark.parametrize(
    "spoiled", [b'{"form": 1, "kind": "beg', b"\xff\xfe no text\n", b"[1]\n", b"null\n"]
)
def test_what_is_no_whole_record_is_passed_over(tmp_path: Path, spoiled: bytes):
    outbox = Outbox(tmp_path, "s")
    outbox.begin(RECORD)
    os.write(outbox.fd, spoiled)
    rows, end = read_from(outbox.fd, 0)
    outbox.close(is_delivered=False)
    assert len(rows) == 1
    assert end == outbox.path.stat().st_size - (0 if spoiled.endswith(b"\n") else len(spoiled))


@pytest.mark.parametrize(
    "row",
    [{}, {"kind": "begin"}, {"kind": "begin", "fields": {"x": 1}}, {"kind": "end", "fields": 3}],
)
def test_a_record_without_its_fields_is_none(row: dict[str, object]):
    assert record_in(row) is None


def test_a_later_form_is_not_guessed_at(tmp_path: Path):
    (tmp_path / "s.jsonl").write_text('{"form": 2}\n')
    with pytest.raises(ValueError, match=r"form 2 .* this one reads 1"):
        rows_left(tmp_path)
    assert len(waiting(tmp_path)) == 1


def test_a_full_disk_leaves_no_half_line():
    outbox = Outbox.__new__(Outbox)
    outbox.path, outbox.fd = Path("/dev/full"), os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space left"):
        outbox.begin(RECORD)
    os.close(outbox.fd)


def test_delivery_position_of_a_file_is_kept_until_removal(tmp_path: Path):
    outbox = Outbox(tmp_path, "s")
    assert delivered_of(outbox.path, outbox.fd) == 0
    outbox.begin(RECORD)
    _rows, end = read_from(outbox.fd, 0)
    note_delivered(outbox.path, end)
    assert outbox.undelivered == []
    outbox.end(RECORD, ENDED)
    assert [row["kind"] for row in outbox.undelivered] == ["end"]
    outbox.close(is_delivered=True)
    note_delivered(outbox.path, 7)  # a process that is late
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "odd", ["\ud800", float("nan"), float("inf"), Path("/x"), {1: 2}, ("a", {"b": (1,)})], ids=repr
)
def test_what_no_json_holds_is_written_as_plain_values(tmp_path: Path, odd: object):
    outbox = Outbox(tmp_path, "s")
    outbox.begin(replace(RECORD, settings={"odd": odd}))
    ((row,), _end) = read_from(outbox.fd, 0)
    assert row["fields"]["settings"] == {"odd": plain_value(odd)}
    outbox.close(is_delivered=True)
