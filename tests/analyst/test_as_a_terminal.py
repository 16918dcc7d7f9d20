"""On a terminal a command shows, byte for byte, what it shows without oomguard, and gets what is typed."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from support.driving import sitting_at, transcript
from support.supervising import QUIET, RUN, state, wait_for

PY = sys.executable


def same(argv: list[str], *keys: tuple[bytes, bytes], folder: Path | None = None) -> bytes:
    """What a command shows, which is the same with and without oomguard."""
    bare = transcript(argv, keys, folder)
    ours = transcript([*QUIET, *argv], keys, folder)
    assert ours == bare
    return ours


def test_its_streams_are_a_terminal_of_the_users_size_and_modes():
    code = "import os; print([os.isatty(n) for n in (0, 1, 2)], os.get_terminal_size(), flush=True); os.system('stty -a')"
    assert b"[True, True, True] os.terminal_size(columns=80, lines=24)" in same([PY, "-c", code])


def test_a_progress_bar_stays_in_its_line():
    pytest.importorskip("tqdm")
    code = (
        "from tqdm import tqdm\n"
        "for _ in tqdm(range(50), mininterval=0, miniters=1, bar_format='{l_bar}{bar}|{n_fmt}/{total_fmt}'): pass"
    )
    assert same([PY, "-c", code]).count(b"\r") > 50


def test_input_asks_edits_its_line_and_sees_the_end():
    code = "import sys\nprint(repr(input('name? ')))\nprint(repr(input('again? ')))\nprint(repr(sys.stdin.read()))"
    keys = ((rb"name\? ", b"mx\x7fe\r"), (rb"again\? ", b"you\r"), (rb"'you'\r\n", b"rest\r\x04"))
    shown = same([PY, "-c", code], *keys)
    assert b"'me'" in shown
    assert b"'rest\\n'" in shown


def test_ctrl_d_ends_a_prompt():
    code = "try: input('name? ')\nexcept EOFError: print('no more')"
    assert b"no more" in same([PY, "-c", code], (rb"name\? ", b"\x04"))


def test_a_password_is_not_shown():
    code = "import getpass; print(len(getpass.getpass('secret: ')))"
    shown = same([PY, "-c", code], (b"secret: ", b"hunter2\r"))
    assert b"hunter2" not in shown
    assert b"7" in shown


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (b"hello\n\x04", "'hello\\n'"),
        (b"\x04", "''"),
        (b"hello\x04\x04", "'hello'"),
    ],
)
def test_ctrl_d_typed_early_is_the_commands_end_of_file(typed, read):
    waiting = ["sh", "-c", 'echo GO; kill -STOP $$; exec "$@"', "sh"]
    with sitting_at(
        [*waiting, *QUIET, PY, "-c", "import sys; print('READ', repr(sys.stdin.read()))"]
    ) as terminal:
        terminal.until(b"GO")
        assert wait_for(lambda: state(terminal.leader) == "T")
        terminal.type(typed)
        os.kill(terminal.leader, signal.SIGCONT)
        terminal.until(f"READ {re.escape(read)}".encode())


CURSES = """
import curses
def main(screen):
    screen.addstr(3, 5, f"size {curses.LINES} {curses.COLS}", curses.A_REVERSE)
    screen.refresh()
    key = screen.getch()
    screen.addstr(4, 5, f"key {key}")
    screen.refresh()
    return screen.getch()
print("left with", curses.wrapper(main))
"""


def test_a_curses_program_draws_its_screen_and_gets_keys():
    shown = same([PY, "-c", CURSES], (b"size 24 80", b"\x1bOA"), (b"key 259", b"q"))
    assert b"left with 113" in shown


def test_bytes_of_every_kind_pass_both_ways():
    code = "import os, tty; tty.setraw(0); os.write(1, b'go'); d = os.read(0, 512); os.write(1, bytes(range(256)) * 40 + d)"
    typed = bytes(range(256))
    assert same([PY, "-c", code], (b"go", typed)).endswith(typed)


def test_a_long_output_passes_whole():
    shown = same([PY, "-c", "for n in range(100_000): print('line', n)"])
    assert shown == b"".join(b"line %d\r\n" % n for n in range(100_000))


@pytest.mark.parametrize("stream", ["out", "error"])
def test_the_stream_that_is_no_terminal_stays_apart(stream, tmp_path):
    number, other = (1, 2) if stream == "out" else (2, 1)
    code = f"import os; os.write({number}, b'here\\n'); os.write({other}, b'there\\n'); print([os.isatty(n) for n in (0, 1, 2)])"
    path = tmp_path / "kept"
    shell = ["sh", "-c", f'exec "$@" {number}>{path}', "sh"]
    bare = transcript([*shell, PY, "-c", code]), path.read_bytes()
    ours = transcript([*shell, *QUIET, PY, "-c", code]), path.read_bytes()
    assert ours == bare
    assert b"here\n" in ours[1]


def test_without_pty_its_output_is_a_pipe():
    code = "import os; print([os.isatty(n) for n in (0, 1, 2)])"
    assert transcript([*RUN, "-q", "--no-pty", "--", PY, "-c", code]) == b"[True, False, False]\r\n"
