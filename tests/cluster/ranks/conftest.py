"""A job of ranks, each under an oomguard of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.supervising import LIMIT_S, RUN

JOB = Path(__file__).with_name("ranked_job.py")


@dataclass
class Job:
    """The ranks of one job, started together."""

    folder: Path
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self,
        size: int,
        *options: str,
        rendezvous: str = "",
        are_apart: bool = False,
        words: dict[str, list[str]] | None = None,
        **job: Any,
    ) -> None:
        """Start the ranks, which meet in the job's folder; ``job`` are the variables of ranked_job.py, mappings by rank.

        ``words`` stand at the end of a rank's command, by rank. Where they are apart, each has temporary files of its own, as on a host of its own.
        """
        variables = {
            name.upper(): value if isinstance(value, str) else json.dumps(value)
            for name, value in job.items()
        }
        for rank in range(size):
            own = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "JOB": str(self.folder),
                "OMP_NUM_THREADS": "1",
            }
            if are_apart:
                own["TMPDIR"] = str(self.folder / f"host-{len(self.ranks)}")
                Path(own["TMPDIR"]).mkdir()
            given = {
                name: value
                for name, value in os.environ.items()
                if name not in {"MASTER_ADDR", "MASTER_PORT"}
            }
            meets = (
                "--rank",
                str(rank),
                "--world-size",
                str(size),
                "--rendezvous",
                rendezvous or str(self.folder),
            )
            command = [
                *RUN,
                *meets,
                *options,
                "--",
                sys.executable,
                str(JOB),
                *(words or {}).get(str(rank), []),
            ]
            self.ranks.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**given, **variables, **own},
                    cwd=self.folder,
                )
            )

    def ended(self) -> list[tuple[int, str, str]]:
        """Return status, output and errors of each rank."""
        told = [(*rank.communicate(timeout=LIMIT_S), rank.returncode) for rank in self.ranks]
        return [(status, output, errors) for output, errors, status in told]

    def lengths(self) -> list[list[int]]:
        """Return the lengths that each rank ran with, in order."""
        paths = [self.folder / f"lengths-{rank}.log" for rank in range(len(self.ranks))]
        return [
            [int(line) for line in path.read_text().split()] if path.exists() else []
            for path in paths
        ]

    def wait_until_all_run(self) -> None:
        """Wait until every rank's command runs and has met the others."""
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            docs = [json.loads(path.read_text()) for path in self.folder.rglob("here/*.json")]
            leader = next((doc for doc in docs if doc["rank"] == 0), {"met": {}})
            if len(leader["met"]) == len(self.ranks) - 1 and all(self.lengths()):
                return
            time.sleep(0.05)
        raise TimeoutError


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job whose processes are ended with the test."""
    made = Job(tmp_path)
    yield made
    for rank in made.ranks:
        with contextlib.suppress(OSError):
            rank.kill()
        rank.communicate()
