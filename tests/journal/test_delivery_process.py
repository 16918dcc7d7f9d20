"""The process that delivers: it shows no password, ends with its run, and is started again if it is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oomguard.journal.codec import AttemptRow
from oomguard.journal.delivery import DeliveryProcess, SharedJournal, _Deliverer
from oomguard.journal.location import JournalUrl
from oomguard.journal.outbox import Outbox, delivered_of, waiting
from oomguard.journal.queries import RunQuery, open_journal, past_runs
from oomguard.supervisor import tree
from support.supervising import LIMIT_S

AWAY = JournalUrl("postgresql://ann:Hunter2correct@127.0.0.1:1/team")
WRITER = """
import sys, time
from oomguard.journal.location import JournalUrl
from oomguard.journal.codec import AttemptRow
from oomguard.journal.delivery import SharedJournal
journal = SharedJournal(JournalUrl(sys.argv[1]))
journal.begin(AttemptRow("s", 1, ["x"], {}, []))
print("written", flush=True)
time.sleep(600)
"""


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def deliverers(root: int) -> list[int]:
    found = []
    for pid in tree.descendants(root):
        with contextlib.suppress(OSError):
            if b"oomguard.journal.delivery" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.fixture
def writer() -> Iterator[subprocess.Popen[str]]:
    """A run that has written, and whose deliverer has begun."""
    command = [sys.executable, "-c", WRITER, AWAY.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "written\n"
        until(lambda: deliverers(running.pid))
        yield running
        running.kill()


def test_helper_has_its_own_session_and_shows_no_password(writer):
    (pid,) = deliverers(writer.pid)
    command, environment = (
        Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")
    )

    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert b"Hunter2correct" not in command + environment
    assert Path(f"/proc/{writer.pid}/fd/1").readlink() not in {
        path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()
    }


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_the_run_is_killed(writer, number):
    (pid,) = deliverers(writer.pid)
    writer.send_signal(number)
    writer.wait(LIMIT_S)

    until(lambda: not Path(f"/proc/{pid}").exists() or tree.parent(pid) is None)


def test_where_it_is_gone_the_next_write_starts_another():
    journal = SharedJournal(AWAY)
    journal.begin(AttemptRow("one", 1, ["x"], {}, []))
    until(lambda: deliverers(os.getpid()))
    (pid,) = deliverers(os.getpid())
    os.kill(pid, signal.SIGKILL)
    journal.begin(AttemptRow("one", 2, ["x"], {}, []))
    left = journal.finish(LIMIT_S)

    assert left is not None
    assert left.attempts == 2
    assert "refused" in left.reason


def test_nothing_of_it_is_left_when_the_run_has_finished():
    journal = SharedJournal(AWAY)
    journal.begin(AttemptRow("s", 1, ["x"], {}, []))
    assert journal.finish(0.0) is not None
    assert deliverers(os.getpid()) == []


def test_what_a_run_wrote_just_before_it_was_killed_is_delivered(database: str):
    location = JournalUrl(database)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, database], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "written\n"
        run.kill()
    until(lambda: not waiting(location.outbox))
    with open_journal(location) as connection:
        assert connection is not None
        assert [past.session for past in past_runs(connection, RunQuery())] == ["s"]


def test_short_run_leaves_old_outbox_rows_to_the_delivery(
    database: str,
):
    for session in ("one", "two"):
        outage = SharedJournal(AWAY)
        outage.begin(AttemptRow(session, 1, ["x"], {}, []))
        assert outage.finish(LIMIT_S) is not None
    there = JournalUrl(database).outbox
    there.mkdir(parents=True)
    for path in waiting(AWAY.outbox):
        path.rename(there / path.name)

    run = [sys.executable, "-m", "oomguard", "run", "--journal", database, "--", "true"]
    assert (
        subprocess.run(run, capture_output=True, text=True, timeout=LIMIT_S, check=True).stderr
        == ""
    )
    until(lambda: not waiting(there))
    with open_journal(JournalUrl(database)) as connection:
        assert connection is not None
        assert {run.command for run in past_runs(connection, RunQuery())} == {("x",), ("true",)}
        assert len(past_runs(connection, RunQuery())) == 3


def test_where_nothing_else_waits_no_process_outlives_the_run(database: str):
    journal = SharedJournal(JournalUrl(database))
    journal.begin(AttemptRow("s", 1, ["x"], {}, []))
    assert journal.finish(LIMIT_S) is None
    assert deliverers(os.getpid()) == []


def test_it_delivers_whole_lines_and_notes_how_far(database: str, tmp_path: Path):
    outbox = Outbox(tmp_path, "s")
    for number in (1, 2):
        outbox.begin(AttemptRow("s", number, ["x"], {}, []))
    whole = outbox.path.stat().st_size
    os.write(outbox.fd, b'{"form": 1, "kind"')
    process = DeliveryProcess(JournalUrl(database), outbox.path)
    assert process.last_answer(LIMIT_S) == {}
    process.kill()
    assert delivered_of(outbox.path, outbox.fd) == whole
    outbox.close(is_delivered=True)


def test_late_rows_are_delivered_without_another_write(database: str):
    journal = SharedJournal(JournalUrl(database))
    begun = [journal.begin(AttemptRow("s", number, ["x"], {}, [])) for number in (1, 2, 3)]

    def attempts() -> int:
        with open_journal(JournalUrl(database)) as connection:
            runs = [] if connection is None else past_runs(connection, RunQuery())
        return len(runs[0].attempts) if runs else 0

    until(lambda: attempts() >= 1)
    journal.end(begun[2], exit_status=0, incident=None, measured={})
    for number in (4, 5):
        journal.begin(AttemptRow("s", number, ["x"], {}, []))
    until(lambda: attempts() == 5)
    assert journal.finish(LIMIT_S) is None


def test_an_idle_one_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("oomguard.journal.delivery._IDLE_S", -1.0)
    outbox = Outbox(tmp_path, "s")
    _Deliverer(AWAY, outbox.path).run()  # nothing is written, so it needs no database
    outbox.close(is_delivered=True)
