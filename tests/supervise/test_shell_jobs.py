"""Under a real bash: jobs stop and go on, the shell has its terminal back, and a job behind it leaves the terminal alone."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from support.driving import Terminal, shell
from support.supervising import QUIET, state, wait_for

PY = sys.executable
RUNS_HEX = Path(__file__).with_name("runs_hex.py")
# Answers each line that is typed, and tells a new size of its window.
ANSWERS = """
import os, signal, sys
signal.signal(signal.SIGWINCH, lambda *_: os.write(1, b"SIZE %d %d\\n" % tuple(os.get_terminal_size())))
signal.signal(signal.SIGCONT, lambda *_: os.write(1, b"GOES ON\\n"))
print("READY", os.getpid(), flush=True)
while line := sys.stdin.readline(): print("GOT", line.strip(), flush=True)
print("END OF INPUT")
"""
READS_LATER = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
print("READY", os.getpid(), flush=True)
signal.pause()
print("GOT", sys.stdin.readline().strip(), flush=True)
"""


@contextmanager
def bash() -> Iterator[Terminal]:
    """A shell in which ``run`` is oomguard, and ``answers`` a command."""
    with shell() as terminal:
        command(terminal, f"alias run='{shlex.join(QUIET)}'")
        command(terminal, f"""PY="{PY} {RUNS_HEX}"; stty sane""")
        yield terminal


def command(terminal: Terminal, line: str) -> None:
    """Type a line, and wait for the next prompt."""
    terminal.type(line.encode() + b"\r")
    terminal.until(b"PROMPT> $")


def begin(terminal: Terminal, line: str) -> None:
    terminal.type(line.encode() + b"\r")
    terminal.until(b"\n")


def py(code: str) -> str:
    """Return a command that runs the code; its line, which the terminal shows too, does not hold what it prints."""
    return f"$PY {code.encode().hex()}"


def modes(terminal: Terminal) -> bytes:
    """The modes that a command has which the shell starts, at its prompt."""
    terminal.type(b"stty -g | sed s/^/MODES/\r")
    found = terminal.until(rb"MODES([0-9a-f:]+)\r\n").group(1)
    terminal.until(b"PROMPT> ")
    return found


def is_told_stopped(terminal: Terminal, by: bytes) -> None:
    """Ask the shell until it tells so: it learns of a stop when the last thread has, a moment after the first."""
    for _ in range(50):
        terminal.type(b"jobs -l\r")
        if b"Stopped (" + by + b")" in terminal.until(rb"(?s)jobs -l.*?PROMPT> ").group():
            return
        time.sleep(0.1)
    raise AssertionError(f"the shell never told that it was stopped by {by!r}")


def oomguards(terminal: Terminal) -> psutil.Process:
    """The oomguard that the shell started."""
    (found,) = psutil.Process(terminal.leader).children()
    return found


def test_ctrl_z_gives_the_shell_its_terminal_and_fg_the_command():
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"run {py(ANSWERS)}")
        child = int(terminal.until(rb"READY (\d+)").group(1))
        for text in (b"one", b"two", b"three"):
            terminal.becomes_raw()
            terminal.type(text + b"\r")
            terminal.until(b"GOT " + text)
            terminal.type(b"\x1a")
            terminal.until(rb"\[1\]\+  Stopped  ")
            assert state(child) == "T"
            assert modes(terminal) == before
            begin(terminal, "fg")
            terminal.until(b"GOES ON")
        terminal.becomes_raw()
        terminal.type(b"\x04")
        terminal.until(rb"END OF INPUT\r\n.*PROMPT> ")
        assert modes(terminal) == before
        assert terminal.shown.count(b"GOES ON\r\n") == 3


@pytest.mark.parametrize("by", ["bare", "run"])
def test_a_stopped_command_that_is_killed_ends_the_job(by):
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"{'' if by == 'bare' else 'run '}{py(ANSWERS)}")
        child = int(terminal.until(rb"READY (\d+)").group(1))
        if by == "run":
            terminal.becomes_raw()
        terminal.type(b"\x1a")
        terminal.until(b"Stopped")
        terminal.until(b"PROMPT> ")
        job = oomguards(terminal)
        os.kill(child, signal.SIGKILL)
        assert wait_for(lambda: state(job.pid) in {"", "Z"})
        assert modes(terminal) == before


@pytest.mark.parametrize("by", ["bare", "run"])
def test_a_command_that_stops_itself_gives_the_shell_its_terminal(by):
    """As nano does, by STOP to its group; no key of a raw terminal could continue it."""
    code = (
        "import os, signal, sys\nos.kill(0, signal.SIGSTOP)\nprint('AGAIN', flush=True)\n"
        "print('GOES ON', sys.stdin.readline().strip(), flush=True)"
    )
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"{'' if by == 'bare' else 'run '}{py(code)}")
        terminal.until(b"Stopped")
        terminal.until(b"PROMPT> ")
        assert modes(terminal) == before
        begin(terminal, "fg")
        terminal.until(b"AGAIN")
        terminal.type(b"x\r")
        terminal.until(b"GOES ON x")


def test_a_size_that_changed_while_it_was_stopped_is_the_commands_too():
    with bash() as terminal:
        begin(terminal, f"run {py(ANSWERS)}")
        terminal.until(b"READY")
        terminal.resize(30, 90)
        terminal.until(b"SIZE 90 30")
        terminal.type(b"\x1a")
        terminal.until(b"Stopped")
        terminal.resize(31, 91)
        begin(terminal, "fg")
        terminal.until(b"SIZE 91 31")
        terminal.type(b"x\r")
        terminal.until(b"GOT x")
        assert terminal.shown.count(b"SIZE") == 2


def test_bg_leaves_the_terminal_to_the_shell_until_fg():
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"run {py(READS_LATER)}")
        child = int(terminal.until(rb"READY (\d+)").group(1))
        terminal.becomes_raw()
        terminal.type(b"\x1a")
        terminal.until(b"Stopped")
        command(terminal, "bg")
        assert wait_for(lambda: state(child) == "S")
        assert modes(terminal) == before
        os.kill(child, signal.SIGUSR1)
        assert wait_for(lambda: state(child) == "T")
        command(terminal, "jobs")
        assert wait_for(lambda: state(oomguards(terminal).pid) == "T")
        is_told_stopped(terminal, b"tty input")
        begin(terminal, "fg")
        terminal.becomes_raw()
        terminal.type(b"hello\r")
        terminal.until(rb"GOT hello\r\n.*PROMPT> ")
        assert modes(terminal) == before


@pytest.mark.parametrize("by", ["bare", "run"])
def test_a_job_that_starts_behind_the_shell_stops_when_it_reads(by):
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"{'' if by == 'bare' else 'run '}{py(ANSWERS)} &")
        terminal.until(b"READY")
        assert wait_for(lambda: state(oomguards(terminal).pid) == "T")
        assert modes(terminal) == before
        is_told_stopped(terminal, b"tty input")
        begin(terminal, "fg")
        terminal.until(b"GOES ON")
        terminal.type(b"me\r")
        terminal.until(b"GOT me")
        terminal.type(b"\x04")
        terminal.until(rb"END OF INPUT\r\n.*PROMPT> ")
        assert modes(terminal) == before


def test_a_running_job_that_fg_brings_back_has_the_keys():
    with bash() as terminal:
        begin(terminal, f"run {py(READS_LATER)} &")
        child = int(terminal.until(rb"READY (\d+)").group(1))
        begin(terminal, "fg")
        terminal.becomes_raw()
        os.kill(child, signal.SIGUSR1)
        terminal.type(b"me\r")
        terminal.until(b"GOT me")


def test_a_stop_that_the_watcher_meets_after_fg_is_over():
    """The command reads between the moment its user's terminal is raw and the one in which it has its own."""
    with bash() as terminal:
        begin(terminal, f"run {py(READS_LATER)} &")
        child = int(terminal.until(rb"READY (\d+)").group(1))
        watcher = psutil.Process(child).parent()
        watcher.suspend()
        begin(terminal, "fg")
        terminal.becomes_raw()
        os.kill(child, signal.SIGUSR1)
        assert wait_for(lambda: state(child) == "T")
        watcher.resume()
        terminal.type(b"me\r")
        terminal.until(rb"GOT me\r\n.*PROMPT> ")
        assert b"Stopped" not in terminal.shown


@pytest.mark.parametrize("by", ["bare", "run"])
def test_a_job_behind_the_shell_that_may_not_print_stops(by):
    with bash() as terminal:
        command(terminal, "stty tostop")
        begin(terminal, f"{'' if by == 'bare' else 'run '}echo 'he''llo' &")
        assert wait_for(lambda: [one for one in psutil.Process(terminal.leader).children() if state(one.pid) == "T"])
        is_told_stopped(terminal, b"tty output")
        assert b"hello" not in terminal.shown
        begin(terminal, "fg")
        terminal.until(b"hello\r\n")


@pytest.mark.parametrize("by", ["bare", "run"])
def test_lines_of_a_job_behind_the_shell_end_as_always(by):
    code = r"import os; os.write(1, b'A1\nA2\r\nA3\rA4' + b'z' * 5000 + b'\r\nA5\n')"
    with bash() as terminal:
        begin(terminal, f"{'' if by == 'bare' else 'run '}{py(code)} &")
        shown = terminal.until(rb"(?s)A1.*A5\r\n").group()
        assert shown == b"A1\r\nA2\r\r\nA3\rA4" + b"z" * 5000 + b"\r\r\nA5\r\n"


@pytest.mark.skipif(not shutil.which("less"), reason="less is not installed")
@pytest.mark.parametrize("by", ["bare", "run"])
def test_a_pager_behind_it_has_the_keys(by):
    with bash() as terminal:
        before = modes(terminal)
        code = "for n in range(300): print('line', n)\nimport time; time.sleep(3600)"
        begin(terminal, f"{'' if by == 'bare' else 'run '}{py(code)} | less")
        terminal.until(rb"line 22\r\n:")
        terminal.type(b" ")
        terminal.until(rb"line 45\r\n:")
        time.sleep(0.5)  # less misses a stop that comes just before it waits for a key, and tells nobody that it waits
        terminal.type(b"\x1a")
        terminal.until(b"Stopped")
        terminal.until(b"PROMPT> ")
        assert modes(terminal) == before
        begin(terminal, "fg")
        terminal.until(rb"line 45\r\n:")
        terminal.type(b" ")
        terminal.until(rb"line 68\r\n:")
        (pager,) = (one for one in psutil.Process(terminal.leader).children() if one.name() == "less")
        terminal.type(b"q")
        pager.wait(60)
        terminal.type(b"\x03")
        terminal.until(b"PROMPT> ")
        assert modes(terminal) == before


@pytest.mark.parametrize("by", ["bare", "run"])
def test_what_is_piped_in_and_what_is_typed_are_two(by):
    code = (
        "import getpass, sys\nprint('piped', sys.stdin.read().strip(), flush=True)\n"
        "print('typed', len(getpass.getpass('secret: ')), flush=True)\nprint('one\\ntwo')"
    )
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"echo in | {'' if by == 'bare' else 'run '}{py(code)}")
        terminal.until(b"piped in\r\nsecret: $")
        terminal.type(b"abc\r")
        terminal.until(rb"\r\ntyped 3\r\none\r\ntwo\r\n.*PROMPT> ")
        assert b"abc" not in terminal.shown
        assert modes(terminal) == before


@pytest.mark.parametrize("by", ["bare", "run"])
def test_others_of_a_pipeline_print_as_always_while_the_command_asks(by):
    code = "for _ in range(3):\n  print(input('name? '), 'answered', flush=True)\nprint('done')"
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"{'' if by == 'bare' else 'run '}{py(code)} | cat")
        for name in (b"one", b"two", b"three"):
            terminal.until(rb"name\? ")
            time.sleep(0.3)  # the command asks
            terminal.type(name + b"\r")
            terminal.until(name + b" answered\r\n")
        terminal.until(b"(?s)done\r\n.*PROMPT> ")  # what was typed is echoed by another way, at times later
        assert modes(terminal) == before


def test_a_program_of_the_whole_screen_at_the_end_of_a_pipeline_prints_as_alone():
    code = (
        "import os, termios\nfd = os.open('/dev/tty', os.O_RDWR)\nm = termios.tcgetattr(fd)\nn = m[:]; n[1] &= ~termios.OPOST\n"
        "termios.tcsetattr(fd, termios.TCSADRAIN, n)\nos.write(fd, b'one\\ntwo\\n')\n"
        "os.read(fd, 99)\ntermios.tcsetattr(fd, termios.TCSADRAIN, m)\nos.write(fd, b'three\\nfour\\n')"
    )
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"echo | run {py(code)}")
        terminal.until(b"one\ntwo\n")
        terminal.type(b"\r")
        terminal.until(b"three\r\nfour\r\n.*PROMPT> ")
        assert modes(terminal) == before


@pytest.mark.parametrize("where", ["{} | cat", "cat /dev/null | {}", "{}"])
def test_ctrl_c_ends_the_command_once_in_a_pipeline_too(where):
    code = (
        "import os, time\n"
        "try: print('READY', flush=True); os.write(2, b'READY'); time.sleep(3600)\n"
        "except KeyboardInterrupt: os.write(2, b'INTERRUPTED'); time.sleep(0.3)"
    )
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, where.format(f"run {py(code)}"))
        terminal.until(b"READY")
        terminal.type(b"\x03")
        terminal.until(b"PROMPT> ")
        assert terminal.shown.count(b"INTERRUPTED") == 1
        assert modes(terminal) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_however_it_is_ended_the_terminal_is_as_before_and_the_tree_gone(number):
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"run {py(ANSWERS)}")
        terminal.until(b"READY")
        terminal.becomes_raw()
        tree = [oomguards(terminal), *oomguards(terminal).children(recursive=True)]
        assert len(tree) == 3
        tree[0].send_signal(number)
        terminal.until(b"PROMPT> ")
        assert modes(terminal) == before
        assert psutil.wait_procs(tree[1:], timeout=60)[1] == []


def test_a_stop_of_oomguard_by_a_debugger_and_fg():
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"run {py(ANSWERS)}")
        terminal.until(b"READY")
        terminal.becomes_raw()
        oomguards(terminal).send_signal(signal.SIGSTOP)
        terminal.until(b"Stopped")
        assert modes(terminal) == before
        begin(terminal, "fg")
        terminal.becomes_raw()
        terminal.type(b"x\r")
        terminal.until(b"GOT x\r\n")
        terminal.type(b"\x04")
        terminal.until(b"PROMPT> ")
        assert modes(terminal) == before


@pytest.mark.parametrize("by", ["bare", "run"])
def test_ctrl_c_ends_a_loop_around_it(by):
    with bash() as terminal:
        begin(terminal, f"for n in 1 2 3; do {'' if by == 'bare' else 'run '}{py(ANSWERS)}; done")
        terminal.until(b"READY")
        terminal.type(b"\x03")
        terminal.until(b"PROMPT> ")
        assert terminal.shown.count(b"READY") == 1


@pytest.mark.parametrize("by", ["bare", "run"])
def test_ctrl_c_ends_a_script_around_it(by):
    words = [*([] if by == "bare" else QUIET), PY, str(RUNS_HEX), ANSWERS.encode().hex()]
    with bash() as terminal:
        begin(terminal, f"bash -c {shlex.quote(shlex.join(words) + '; echo GOES-$((1 + 1))')}")
        terminal.until(b"READY")
        terminal.type(b"\x03")
        terminal.until(b"PROMPT> ")
        assert b"GOES-2" not in terminal.shown


@pytest.mark.parametrize("by", ["bare", "run"])
def test_a_script_goes_on_whose_command_ends_by_itself_at_ctrl_c(by):
    """The usual ``trap '…; exit 130' INT``: no signal ended it."""
    ends = "import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(130)); print('READY', flush=True); signal.pause()"
    words = [*([] if by == "bare" else QUIET), PY, "-c", ends]
    with bash() as terminal:
        begin(terminal, f"bash -c {shlex.quote(shlex.join(words) + '; echo AFTER-$?')}")
        terminal.until(b"READY")
        time.sleep(0.3)  # it waits for the signal
        terminal.type(b"\x03")
        terminal.until(b"AFTER-130")


@pytest.mark.parametrize("by", ["bare", "run"])
def test_a_command_in_the_place_of_its_output_asks_as_always(by):
    """A shell ignores TTIN in ``$(…)``: a command that reads from behind would get an error."""
    with bash() as terminal:
        before = modes(terminal)
        ask = 'bash -c \'read -p "name? " a; echo "<$a>"\''
        begin(terminal, f"x=$({'' if by == 'bare' else 'run '}{ask}); echo got $x")
        terminal.until(rb"name\? ")
        terminal.type(b"me\r")
        terminal.until(rb"(?s)got <me>\r\n.*PROMPT> ")
        assert modes(terminal) == before
