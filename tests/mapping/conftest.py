"""A store in a folder of its own, and a function that notes what it computes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Upper:
    """Writes texts in capitals, and notes its batches."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, texts: list[str]) -> list[str]:
        self.batches.append(list(texts))
        return [text.upper() for text in texts]

    @property
    def computed(self) -> list[str]:
        return [text for batch in self.batches for text in batch]


@pytest.fixture
def upper() -> Upper:
    return Upper()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "results.sqlite"


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a program in a process of its own, in the test's folder."""

    def started(body: str, *words: object) -> subprocess.Popen[str]:
        program = tmp_path / f"program{abs(hash(body))}.py"
        program.write_text(textwrap.dedent(body))
        return subprocess.Popen(
            [sys.executable, str(program), *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return started
