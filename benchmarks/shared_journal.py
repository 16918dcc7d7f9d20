"""Figure: a journal that several share on a real PostgreSQL, while writers and the server are killed with SIGKILL.

64 writers begin and end attempts of ``oomguard run`` as fast as a busy fleet does. 100 times one of them is killed at a random moment and
another takes its place, 5 times the server is killed and started again. A writer notes each call that has returned; in the end what waits
is delivered, as ``oomguard history --deliver`` does, and what was noted is held against the database. A write is timed as the job
waits for it: all of them, those of a writer's first second and those while the server is away too. Beside each, in turns before and
after it, a bare append of as many bytes to a file of the writer's own is timed: what the machine itself takes for that at the moment.
Of each write the kernel tells how long it waited for a processor (``/proc/thread-self/schedstat``); what is left is the journal's own:
its processor time, and what it waited for a lock or the file system. ``--writers 8`` shows the same with fewer of them for a processor.

``--kill-every`` is the mean time between two kills. Each starts an interpreter and a process that delivers, 2 s of a core together:
below 2 s, kills alone keep two cores busy, and what is timed is the wait for a core.
"""

import argparse
import functools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from oomguard.journal.delivery import deliver_left_behind
from oomguard.journal.location import JournalUrl
from oomguard.journal.outbox import waiting
from oomguard.journal.read import open_journal
from oomguard.journal.record import Ran, Record
from oomguard.journal.shared import SharedJournal
from support.commands import ROOT
from support.figure import conclude, skip
from support.postgresql import throwaway

GOAL_MS = 1.0
PAUSE_S, AWAY_S, END_S = 0.4, 2.0, 120
WAITED_NS = 100_000
LINE = b"x" * 1000 + b"\n"  # about as long as a record
WRITER = "import shared_journal; shared_journal.write()"
INCIDENT = {
    "kind": "cuda_oom",
    "causes": [{"id": "batch_too_large", "explanation": "x" * 500}],
    "message": "CUDA out of memory " * 100,
}


def write() -> None:
    """Be a writer: what the processes below run. Each call that has returned is noted with the time that it took."""
    url, session, notes = sys.argv[1:]
    noted = os.open(notes, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    bare = os.open(f"{notes}.bare", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    journal, draw, number = SharedJournal(JournalUrl(url)), random.Random(session), 0
    words, ran = (
        ["vllm", "serve", "org/Model-8B", "--max-model-len", "32768"],
        Ran("vllm", "0.33.0", "org/Model-8B", "H100"),
    )

    def note(kind: str, call: Callable[[], object]) -> None:
        calls = [call, lambda: os.write(bare, LINE)]
        took, alone = timed(calls) if number % 2 else timed(calls[::-1])[::-1]
        os.write(noted, f"{kind} {number} {took[0]} {took[1]} {alone[0]}\n".encode())
        time.sleep(draw.uniform(0, PAUSE_S))

    while not stopped:
        number += 1
        record = Record(session, number, words, {"max_model_len": 1792}, [], original=words, who="ann", host="node7")
        note("begin", functools.partial(journal.begin, record))
        incident = INCIDENT if draw.random() < 1 / 3 else None
        status = int(incident is not None)
        note(
            "end",
            functools.partial(
                journal.end, record, exit_status=status, incident=incident, measured={"x": 1.0}, ran=ran, seconds=1.0
            ),
        )
    journal.finish(END_S)


def timed(calls: list[Callable[[], object]]) -> list[tuple[int, int]]:
    """Return how many nanoseconds each call took, and for how many of them it waited for a processor."""
    took = []
    for call in calls:
        waited = waited_ns()
        began, worked = time.perf_counter_ns(), time.thread_time_ns()
        call()
        worked, wall = time.thread_time_ns() - worked, time.perf_counter_ns() - began
        took.append(
            (wall, min(waited_ns() - waited, max(0, wall - worked)))
        )  # the kernel's count has more than the call
    return took


def waited_ns() -> int:
    """Return how long this thread has waited for a processor so far."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])


class Note(NamedTuple):
    """A call that returned: of which attempt, how many nanoseconds it took and waited for a processor, and a bare append beside it took."""

    kind: str
    number: int
    took_ns: int
    waited_ns: int
    bare_ns: int


class Fleet:
    """The writers, and the notes of all that ever were."""

    def __init__(self, url: str, folder: Path, count: int) -> None:
        self.url, self.folder, self.begun = url, folder, 0
        self.writers = [self.start() for _ in range(count)]
        self.names = [f"w{at}" for at in range(1, count + 1)]

    def start(self) -> subprocess.Popen[bytes]:
        self.begun += 1
        name = f"w{self.begun}"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
        return subprocess.Popen([sys.executable, "-c", WRITER, self.url, name, str(self.folder / name)], env=env)

    def kill(self, draw: random.Random) -> None:
        """Kill one that has written, and start another."""
        at = draw.choice([at for at, name in enumerate(self.names) if (self.folder / name).exists()])
        self.writers[at].kill()
        self.writers[at].wait()
        self.names[at] = f"w{self.begun + 1}"
        self.writers[at] = self.start()

    def stop(self) -> None:
        for writer in self.writers:
            writer.terminate()
        for writer in self.writers:
            writer.wait(2 * END_S)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.writers:
            writer.kill()
            writer.wait()

    def notes(self) -> dict[str, list[Note]]:
        """By session: each call that returned."""
        found = {}
        for path in (path for path in self.folder.iterdir() if not path.suffix):
            rows = [line.split() for line in path.read_text().splitlines()]
            found[path.name] = [Note(kind, *map(int, numbers)) for kind, *numbers in rows]
        return found


def wait_for_notes(fleet: Fleet) -> None:
    """Wait until every writer has written."""
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        if len(fleet.notes()) >= len(fleet.writers) and all(fleet.notes().values()):
            return
        time.sleep(0.2)


def problems(shared: JournalUrl, notes: dict[str, list[Note]]) -> tuple[list[str], int]:
    """Return what is lost, and what is there twice or never was, and how many attempts there are."""
    with open_journal(shared) as database:
        assert database is not None
        rows = database.query("SELECT session, number, ended_at FROM attempt")
        runs = Counter(session for (session,) in database.query("SELECT session FROM run"))
    there = Counter((session, number) for session, number, _ in rows)
    ended = {(session, number) for session, number, ended_at in rows if ended_at is not None}
    found = [
        f"attempt {number} of {session} is there {count} times"
        for (session, number), count in there.items()
        if count > 1
    ]
    found += [f"run {session} is there {count} times" for session, count in runs.items() if count > 1]
    for session, calls in notes.items():
        begun = {note.number for note in calls if note.kind == "begin"}
        found += [
            f"the begin of attempt {number} of {session} is lost" for number in begun if (session, number) not in there
        ]
        over = {note.number for note in calls if note.kind == "end"}
        found += [
            f"the end of attempt {number} of {session} is lost" for number in over if (session, number) not in ended
        ]
        unknown = [number for own, number in there if own == session and number > max(begun, default=0) + 1]
        found += [f"attempt {number} of {session} never was" for number in unknown]
    return found, len(rows)


def main() -> None:
    """Kill, count, and time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--writers", type=int, default=64)
    parser.add_argument("--kills", type=int, default=100, help="of writers")
    parser.add_argument("--server-kills", type=int, default=5)
    parser.add_argument("--kill-every", type=float, default=2.5, help="seconds, in the mean")
    arguments = parser.parse_args()
    if throwaway.programs() is None:
        skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and nothing is left behind
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, throwaway.server() as server:
        os.environ["XDG_STATE_HOME"] = str(Path(folder) / "state")
        (Path(folder) / "notes").mkdir()
        shared = JournalUrl(server.create("team"))
        with Fleet(shared.url, Path(folder) / "notes", arguments.writers) as fleet:
            wait_for_notes(fleet)
            server_kills = 0
            for kill in range(1, arguments.kills + 1):
                time.sleep(draw.uniform(0, 2 * arguments.kill_every))
                fleet.kill(draw)
                if kill * arguments.server_kills // arguments.kills > server_kills:
                    server_kills += 1
                    server.kill()
                    time.sleep(AWAY_S)
                    server.start()
                    print(f"{kill} writers and {server_kills} times the server killed", flush=True)
            fleet.stop()
        behind = len(waiting(shared.outbox))
        delivered = deliver_left_behind(shared)
        notes = fleet.notes()
        found, attempts = problems(shared, notes)
        still = len(waiting(shared.outbox))
    report(arguments, found, notes, attempts)
    print(f"{behind} files were left behind, {delivered.attempts} attempts in them; {still} files wait now")
    calls = [note for each in notes.values() for note in each]
    p99 = told("writes", [note.took_ns for note in calls])
    own = told("of them without the wait for a processor", [note.took_ns - note.waited_ns for note in calls])
    waited = sum(note.waited_ns > WAITED_NS for note in calls)
    print(f"{waited:,} writes ({waited / len(calls):.1%}) waited for a processor, more than {WAITED_NS / 1e6:g} ms")
    told("bare appends beside them", [note.bare_ns for note in calls])
    conclude(
        f"{arguments.writers} writers, {arguments.kills} of them and {server_kills} times the server killed: of {attempts:,} attempts "
        f"{len(found)} lost or twice (goal 0), p99 of a write {p99:.2f} ms (goal <= {GOAL_MS:g} ms), "
        f"{own:.2f} ms without its wait for a processor",
        met=not found and not still and p99 <= GOAL_MS,
    )


def told(what: str, times_ns: list[int]) -> float:
    """Print how long something took, and return the time that 99 of 100 stayed below, in ms."""
    cuts = statistics.quantiles((time_ns / 1e6 for time_ns in times_ns), n=1000)
    shares = ", ".join(f"p{share / 10:g} {cuts[share - 1]:.3f}" for share in (500, 900, 950, 990, 999))
    print(f"{len(times_ns):,} {what}, in ms: {shares}, the longest {max(times_ns) / 1e6:.1f}")
    return cuts[989]


def report(arguments: argparse.Namespace, found: list[str], notes: dict[str, list[Note]], attempts: int) -> None:
    """Print what is wrong, and that there was something to count."""
    for problem in found[:20]:
        print(problem)
    assert attempts > arguments.writers
    assert len(notes) >= arguments.kills


if __name__ == "__main__":
    main()
