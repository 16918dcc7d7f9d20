"""The bar of a map on a real terminal: what oomguard tells meanwhile stands above it, whole."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
ROOT = Path(__file__).parents[2]
PROGRAM = """
import time
import oomguard, torch
from oomguard.testing import limit_memory
def sums(batch):
    time.sleep(0.12)  # the bar is drawn ten times a second
    return list(torch.ones(len(batch), 256, 1024).sum((1, 2)))
with limit_memory("5 MiB"):
    oomguard.map(sums, range(8), store="bar.sqlite", identity={"model": 1})
"""
PART = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+")


def on_terminal(folder: Path) -> str:
    """Return all that a program wrote on a terminal of 200 columns."""
    ours, its = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "xterm"}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, cwd=folder, env=env, stdin=its, stdout=its, stderr=its, close_fds=True
    ) as program:
        os.close(its)
        written = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # Linux: nobody has the other end any more
                break
            if not more:
                break
            written += more
    os.close(ours)
    assert program.returncode == 0, written.decode()
    return written.decode()


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows after what was written."""
    lines, row, column = [""], 0, 0
    for part in PART.findall(written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif up := re.fullmatch(r"\x1b\[(\d*)A", part):
            row = max(0, row - int(up[1] or 1))
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line for line in lines if line.strip()]


def test_what_is_told_while_a_map_runs_stands_above_its_one_bar(tmp_path):
    *told, bar = screen(on_terminal(tmp_path))

    assert told
    assert all(line.startswith("oomguard: ") for line in told)
    assert bar.startswith("items ")
    assert "8/8" in bar
