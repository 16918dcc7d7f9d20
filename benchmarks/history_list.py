"""Figure: ``oomguard history`` over a journal of 100,000 attempts: the last runs, those that failed, those of a command, one in full.

A third of the runs failed, with the incidents that a schema 1 journal of the tests holds (3 KB each).
"""

import contextlib
import json
import random
import sqlite3
import statistics
import sys
import tempfile
from pathlib import Path

from oomguard.journal.store import Journal
from support.commands import seconds
from support.figure import conclude

ATTEMPTS, ROUNDS, GOAL_S = 100_000, 5, 1.0
SAMPLE = Path(__file__).parents[1] / "tests" / "journal" / "schema_1.sqlite3"
COMMANDS = [["vllm", "serve", "org/Model-8B", "--max-model-len", "32768"], ["python", "job.py"], ["python", "score.py"]]
ASKED = (
    [],
    ["--failed"],
    ["--command", "no such command"],
    ["--command", "8b", "--since", "7d"],
    ["--format", "json"],
    ["20000"],
)


def fill(path: Path) -> None:
    """Write a journal of so many attempts."""
    with contextlib.closing(sqlite3.connect(SAMPLE)) as sample:
        incidents = [text for (text,) in sample.execute("SELECT incident FROM attempt WHERE incident IS NOT NULL")]
        patches = next(iter(sample.execute("SELECT patches FROM attempt WHERE patches <> '[]'")))[0]
    Journal(path)
    draw, runs, attempts = random.Random(7), [], []
    while len(attempts) < ATTEMPTS:
        session, command, at = f"s{len(runs)}", json.dumps(draw.choice(COMMANDS)), 1.7e9 + 60 * len(attempts)
        runs.append((session, command))
        if draw.random() < 1 / 3:
            attempts.append((session, 1, at, at + 30, command, "{}", "[]", draw.choice(incidents), 1))
            attempts.append((session, 2, at + 31, at + 50, command, '{"max_model_len": 1792}', patches, None, 0))
        else:
            attempts.append((session, 1, at, at + 50, command, "{}", "[]", None, draw.choice((0, 0, 1, 143))))
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.executemany("INSERT INTO run (session, original) VALUES (?, ?)", runs)
        database.executemany(
            "INSERT INTO attempt (session, number, started_at, ended_at, command, settings, patches, incident, exit_status,"
            " predicted, measured) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, '{}', '{}')",
            attempts,
        )


def main() -> None:
    """Measure each question; the slowest median counts."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.sqlite3"
        fill(journal)
        print(f"{ATTEMPTS:,} attempts, {journal.stat().st_size / 2**20:.0f} MiB")
        slowest = 0.0
        for asked in ASKED:
            command = [sys.executable, "-m", "oomguard", "history", "--journal", str(journal), *asked]
            took = statistics.median(seconds(command) for _ in range(ROUNDS))
            print(f"{took:6.2f} s  history {' '.join(asked)}")
            slowest = max(slowest, took)
    conclude(f"history over {ATTEMPTS:,} attempts: at most {slowest:.2f} s (goal < {GOAL_S:g})", met=slowest < GOAL_S)


if __name__ == "__main__":
    main()
