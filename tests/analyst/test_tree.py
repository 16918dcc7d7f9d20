"""Nothing is orphaned: adopted processes are reaped as they die, and the tree goes however oomguard ends."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.supervising import LIMIT_S, QUIET, RUN, left, marked, state, wait_for

HERE = Path(__file__).parent
# Starts another process as its words say, tells both numbers, and sleeps.
NESTED = "import os, subprocess, sys, time\n{before}\np = subprocess.Popen([sys.executable, '-c', {inner!r}]{options})\ntime.sleep(3600)"
INNER = "import os, time\n{before}\nprint('UP', os.getpid(), flush=True)\ntime.sleep(3600)"
IGNORING = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN)"
TREES = {
    "a child": ("", "", ""),
    "in a session of its own": ("", "", ", start_new_session=True"),
    "without our environment": ("", "", ", start_new_session=True, env={}"),
    "that ignores TERM": (IGNORING, IGNORING, ", start_new_session=True"),
    "whose parent has gone": ("", "if os.fork(): os._exit(0)", ", start_new_session=True"),
}
EACH_TREE = pytest.mark.parametrize("tree", ["that ignores TERM", "whose parent has gone"])


def started(
    tree: str, tmp_path: Path, *options: str, **popen: object
) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """oomguard with such a tree below it, and every process of it but oomguard itself."""
    before, inner_before, inner_options = TREES[tree]
    code = NESTED.format(
        before=before, inner=INNER.format(before=inner_before), options=inner_options
    )
    command = [
        *RUN,
        "-q",
        "--journal",
        str(tmp_path / "journal"),
        *options,
        "--",
        sys.executable,
        "-c",
        code,
    ]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **popen
    )
    pid = int(process.stdout.readline().split()[1])
    below = psutil.Process(process.pid).children(recursive=True)
    assert pid in [one.pid for one in below]
    return process, below


def watcher_of(process: subprocess.Popen) -> psutil.Process:
    """The process that is the parent of the command; another one may analyze meanwhile."""
    (found,) = (
        one for one in psutil.Process(process.pid).children() if one.name() == "oomguard-watch"
    )
    return found


def gone(below: list[psutil.Process]) -> bool:
    return psutil.wait_procs(below, timeout=LIMIT_S)[1] == []


@EACH_TREE
def test_a_killed_oomguard_takes_its_tree_along(tree, tmp_path):
    process, below = started(tree, tmp_path)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    assert gone(below)
    assert wait_for(lambda: list(tmp_path.glob("oomguard-*")) == [])


def test_a_killed_watcher_ends_the_run_and_leaves_nothing(tmp_path):
    tree = "without our environment"
    process, below = started(tree, tmp_path)
    watcher = watcher_of(process)
    watcher.kill()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 137
    assert gone(below)


def test_a_stop_leaves_nothing(tmp_path):
    number = signal.SIGTERM
    process, below = started("that ignores TERM", tmp_path, "--grace", "1")
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode in {128 + number, 137}
    assert gone(below)
    assert list(tmp_path.glob("oomguard-*")) == []


def test_where_the_command_is_killed_alone_its_tree_goes_too(tmp_path):
    process, below = started("in a session of its own", tmp_path)
    watcher = watcher_of(process)
    (command,) = (one for one in watcher.children() if one.name() != "group-witness")
    command.kill()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 137
    assert gone(below)


ORPHANS = """
import os, sys, time
for _ in range(10):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.2)
        os._exit(0)
    os.wait()
print('READY', flush=True)
sys.stdin.read()
"""


def test_orphans_that_end_while_the_command_runs_are_reaped():
    command = [*QUIET, sys.executable, "-c", ORPHANS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"READY\n"
        alone = 2  # the witness and the command
        assert wait_for(lambda: len(watcher_of(process).children(recursive=True)) == alone)
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0


# A script that leads a session, as under cron or setsid: one of its group is stopped while the command runs.
STOPS_ONE = """
sleep 1000 & sleeper=$!
kill -STOP $sleeper
"$@"
echo status $?
kill -KILL $sleeper
"""


def test_session_group_with_a_stopped_member_gets_no_hangup():
    command = "sleep 0.2 & exit 3"
    argv = [*QUIET, "sh", "-c", command]
    done = subprocess.run(
        ["sh", "-c", STOPS_ONE, "sh", *argv],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        start_new_session=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "status 3\n")


def test_the_watcher_costs_less_than_10_mb():
    with subprocess.Popen(
        [*QUIET, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"
        watcher = watcher_of(process)
        own_bytes = watcher.memory_full_info().uss
        process.stdin.close()
        process.wait(LIMIT_S)
    assert own_bytes < 10_000_000


def test_the_watcher_holds_no_output_open(tmp_path):
    """A reader of oomguard's output sees its end when oomguard is gone, also while the tree is still being ended."""
    process, below = started("that ignores TERM", tmp_path)
    watcher = watcher_of(process)
    pipes = {Path(f"/proc/{process.pid}/fd/{number}").readlink() for number in (1, 2)}
    held = {path.readlink() for path in Path(f"/proc/{watcher.pid}/fd").iterdir()}
    assert not pipes & held
    process.kill()
    process.communicate(timeout=LIMIT_S)
    assert gone(below)


def test_command_inherits_exactly_the_given_descriptors(tmp_path):
    """Among them those of ``<(…)`` and of make's jobserver."""
    (tmp_path / "given").write_text("hello")
    code = "import os; print(sorted(os.listdir('/proc/self/fd'), key=int)); print(os.read(7, 9))"
    script = ["bash", "-c", f'exec 7<{tmp_path / "given"}; exec "$@"', "bash"]
    bare, ours = [
        subprocess.run(
            [*script, *by, sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for by in ([], QUIET)
    ]
    assert "b'hello'" in bare
    assert ours == bare


def test_a_kill_in_the_middle_of_a_relaunch_leaves_nothing(tmp_path):
    mark = f"relaunch-{os.getpid()}-{time.monotonic_ns()}"
    engine = [sys.executable, str(HERE / "fake_engine.py"), "--mode", "wait"]
    command = [*RUN, "--journal", str(tmp_path / "journal"), "--", *engine]
    env = marked(mark, {"TMPDIR": str(tmp_path)})
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    ) as process:
        assert any(line == b"READY\n" for line in process.stdout)
        assert len(left(mark)) == 5
        process.kill()
    assert wait_for(lambda: left(mark) == [])
    assert wait_for(lambda: list(tmp_path.glob("oomguard-*")) == [])
    with sqlite3.connect(tmp_path / "journal") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def test_first_process_of_a_container_ends_and_reaps_too(tmp_path):
    """A namespace of processes of its own, as a container has: signals without a handler do not reach its first process."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("unshare cannot make a namespace of processes here")
    code = (
        "import os, subprocess, sys, time\nprint('UP', os.getppid(), flush=True)\ntime.sleep(3600)"
    )
    command = [*unshare, *QUIET, sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"UP")
        first = psutil.Process(process.pid).children()[0]
        assert state(first.pid)
        first.terminate()
        assert process.wait(LIMIT_S) == 143
