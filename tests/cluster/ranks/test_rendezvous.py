"""Where ranks meet, as the user says it: what cannot be one is refused before the command; one rank of one needs none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.each import each
from support.supervising import run

RAN = ("sh", "-c", "echo RAN")
ALONE = {
    "launcher": ((), {"RANK": "0", "WORLD_SIZE": "1"}),
}


@pytest.fixture
def environ() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MASTER_", "RANK", "WORLD_"))
    }


@pytest.mark.parametrize("told_by", ALONE)
def test_job_of_one_rank_is_repaired_like_any_command(
    told_by: str, tmp_path: Path, environ: dict[str, str]
):
    options, variables = ALONE[told_by]
    engine = Path(__file__).parents[2] / "analyst" / "fake_engine.py"
    command = ("sh", "-c", f"exec python3 {engine}")
    ran = run(
        *options, "--rendezvous", str(tmp_path / "d"), command=command, env=environ | variables
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "RESULT 1792"), ran.stderr
    assert not (tmp_path / "d").exists()


@each(
    ("place", "words"),
    [
        ("file", "is not a folder"),
        ("", "the value is empty"),
        ("foo://x", "is invalid"),
    ],
)
def test_what_is_no_place_is_refused_before_the_command(place: str, words: str, tmp_path: Path):
    size = "2"
    (tmp_path / "file").touch()
    where = str(tmp_path / place) if place.startswith("file") else place
    ran = run("--rank", "0", "--world-size", size, "--rendezvous", where, command=RAN)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert words in ran.stderr
    assert "--rendezvous" in ran.stderr
