"""Signals sent to oomguard where no terminal is: each goes on to the command, once; beside tini where it is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from oomguard.engines.command import Launch
from oomguard.supervisor.output_buffer import OutputBuffer
from oomguard.supervisor.process import run_once
from oomguard.supervisor.signals import SignalForwarder
from oomguard.supervisor.streams import StandardInput
from support.each import each
from support.supervising import LIMIT_S, QUIET, RUN, state, wait_for

LISTENER = [sys.executable, str(Path(__file__).with_name("listener.py"))]
ENGINE = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]
FAULTS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGSYS,
}
JOB_STOPS = [signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU]
STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]
NOT_HANDED_ON = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, *FAULTS, *JOB_STOPS}
STANDARD = [n for n in sorted(signal.valid_signals()) if n < 32 and n not in NOT_HANDED_ON]
REAL_TIME = [int(signal.SIGRTMIN), int(signal.SIGRTMIN) + 5, int(signal.SIGRTMAX) - 1]


@contextmanager
def listening(*words: str, prefix: tuple[str, ...] = ()) -> Iterator[tuple[subprocess.Popen, int]]:
    """A listener under a supervisor without a terminal, in a process group as a shell gives a job one; and its number."""
    command = [*prefix, *QUIET, *LISTENER, *words]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        ready = process.stdout.readline().split()
        assert ready[:1] == ["READY"], process.stderr.read()
        try:
            yield process, int(ready[1])
        finally:
            if process.poll() is None:
                os.kill(int(ready[1]), signal.SIGKILL)
                process.send_signal(signal.SIGCONT)


def heard(process: subprocess.Popen) -> list[int]:
    """What the listener got until now; it ends."""
    process.send_signal(
        signal.SIGRTMAX
    )  # of several that wait the lowest comes first: this one is the last
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 7, errors
    assert output.endswith("END\n")
    return [int(line.split()[1]) for line in output.splitlines()[:-1]]


def test_each_signal_that_another_process_sends_goes_on_once():
    sent = [
        number for number in (*STANDARD, *REAL_TIME) if number not in STOPS
    ]  # a third stop kills
    with listening() as (process, _):
        for number in sent:
            process.send_signal(number)
        assert sorted(heard(process)) == sent


def test_job_stop_stops_both_and_cont_continues_both():
    number = signal.SIGTSTP
    with listening("--stoppable") as (process, child):
        process.send_signal(number)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert state(child) == "T"

        process.send_signal(signal.SIGCONT)

        assert heard(process) == [signal.SIGCONT]


def test_a_stopped_command_can_still_be_ended():
    number = signal.SIGTERM
    code = "import signal, os; signal.signal(signal.SIGINT, signal.SIG_DFL); print(os.getpid(), flush=True); signal.pause()"
    command = [*RUN, "-q", "--grace", "100000", "--", sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    ) as process:
        child = int(process.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        assert wait_for(lambda: state(child) == "T")
        process.send_signal(number)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_command_that_ends_by_a_stop_gives_128_plus_its_number(number):
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); print('ready', flush=True); signal.pause()"
    with subprocess.Popen([*QUIET, sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 128 + number


@pytest.mark.parametrize(
    ("number", "relaunched"),
    [
        (signal.SIGUSR1, True),
        (signal.SIGALRM, True),
        (signal.SIGRTMIN + 6, True),
        (signal.SIGTERM, False),
    ],
)
def test_only_a_stop_keeps_a_failure_from_being_remedied(number, relaunched, tmp_path):
    """The group gets the signal, the command survives it and fails of memory afterwards."""
    go = tmp_path / "go"
    script = tmp_path / "engine.py"
    script.write_text(
        f"import os, signal, subprocess, sys, time\nsignal.signal({int(number)}, lambda *_: open({str(go)!r}, 'w').close())\n"
        "print('READY', flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        f"sys.exit(subprocess.run({ENGINE!r}).returncode)\n"
    )
    command = [*RUN, "--journal", str(tmp_path / "journal"), "--", sys.executable, str(script)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout.readline() == "READY\n"
        time.sleep(1)  # until then the analyst has started
        os.killpg(process.pid, number)
        output, errors = process.communicate(timeout=LIMIT_S)
    assert ("RESULT" in output) is relaunched, errors
    assert process.returncode == (0 if relaunched else 1)


def test_grace_of_zero_kills_at_once_without_the_signal(tmp_path):
    seen = tmp_path / "seen"
    code = (
        f"import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: open({str(seen)!r}, 'w').close())\n"
        "print('ready', flush=True)\nwhile True: time.sleep(0.001)"
    )
    command = [*RUN, "-q", "--grace", "0", "--", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 137
    assert not seen.exists()


def test_after_the_grace_the_whole_tree_is_killed():
    inner = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(3600)"
    code = (
        "import signal, subprocess, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.run([sys.executable, '-c', {inner!r}], start_new_session=True)"
    )
    command = [*RUN, "-q", "--grace", "0.2", "--", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        tree = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(LIMIT_S) == 137
        assert time.monotonic() - began < 30  # the grace where none is given
    assert not [one for one in tree if one.is_running()]


def test_a_third_stop_kills_however_long_the_grace():
    code = "import os, signal, time\nsignal.signal(signal.SIGTERM, lambda *_: os.write(1, b'TERM\\n'))\nprint('ready', flush=True)\nwhile True: time.sleep(1)"
    with subprocess.Popen([*QUIET, sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        for expected in (b"ready\n", b"TERM\n", b"TERM\n"):
            assert process.stdout.readline() == expected
            process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 137


SIGNALS_OF_A_PROCESS = ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]


def test_command_starts_with_oomguards_own_signal_settings():
    """``env`` sets them; what the command then finds is what it would find without oomguard."""
    options = ["--ignore-signal=HUP", "--ignore-signal=PWR", "--block-signal=USR1"]
    env = shutil.which("env")
    if (
        env is None
        or subprocess.run([env, *options, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("env cannot set signals here")
    bare = subprocess.run([env, *options, *SIGNALS_OF_A_PROCESS], capture_output=True, check=True)
    ours = subprocess.run(
        [env, *options, *QUIET, *SIGNALS_OF_A_PROCESS], capture_output=True, check=True
    )
    assert ours.stdout == bare.stdout


def test_signal_ignored_at_the_start_reaches_a_handler():
    """``nohup`` ignores HUP, ``&`` in a script INT: a server sets its own handler all the same."""
    number = signal.SIGHUP
    with listening(prefix=("env", f"--ignore-signal={signal.Signals(number).name[3:]}")) as (
        process,
        _,
    ):
        process.send_signal(number)
        assert heard(process) == [number]


FAMILY = """
import os, signal, subprocess, sys, time
if len(sys.argv) > 1:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
heard = []
def tell(number, _frame): heard.append(number); os.write(1, f"{'parent' if len(sys.argv) > 1 else 'child'} {number}\\n".encode())
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT): signal.signal(number, tell)
print("READY", flush=True)
if len(sys.argv) > 1:
    while not heard: time.sleep(0.05)
    time.sleep(0.5)
    os.kill(child.pid, signal.SIGKILL); sys.stdout.write(child.stdout.read())
else:
    while True: signal.pause()
"""


def test_signal_to_the_group_reaches_the_commands_children():
    number = signal.SIGINT
    command = [*QUIET, sys.executable, "-c", FAMILY, FAMILY]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout.readline() == "READY\n"
        os.killpg(process.pid, number)
        assert sorted(process.communicate(timeout=LIMIT_S)[0].split()) == sorted(
            ["parent", "child", *[str(int(number))] * 2]
        )


def test_signal_to_a_whole_service_reaches_the_command_once():
    """systemd with ``KillMode=control-group``, ``scancel --full``, ``kill -1``."""
    number = signal.SIGTERM
    with listening() as (process, _):
        for one in [
            *psutil.Process(process.pid).children(recursive=True),
            psutil.Process(process.pid),
        ]:
            one.send_signal(number)
        time.sleep(0.5)
        assert heard(process) == [number]


def stop_us() -> None:
    """A stop that another process sends: our own are our share of a key."""
    subprocess.run(["kill", "-TERM", str(os.getpid())], check=True)


def test_stop_during_the_start_goes_to_the_command():
    with SignalForwarder() as signals:
        child = signals.reaper.start(["sleep", "3600"], os.environ, shares_group=False)
        stop_us()
        assert wait_for(lambda: signals.stopped_by is not None)
        assert child.poll() is None
        signals.attach(grace_s=100)
        assert wait_for(lambda: child.poll() is not None)
        signals.detach()
        assert signals.reaper.end(0) is True
    for pipe in child.outputs.values():
        pipe.close()
    assert child.returncode == -signal.SIGTERM


@each("number", [signal.SIGUSR1, signal.SIGABRT])
def test_signal_before_the_start_is_forwarded_at_the_start(number):
    with SignalForwarder() as signals:
        os.kill(os.getpid(), number)
        assert wait_for(lambda: bool(signals._early), LIMIT_S)
        ended = run_once(Launch(("sleep", "60")), OutputBuffer(), signals, StandardInput())
    assert ended.status == 128 + number


def test_after_a_stop_nothing_is_started():
    with SignalForwarder() as signals:
        stop_us()
        assert wait_for(lambda: signals.stopped_by is not None)
        ended = run_once(Launch(("no-such-command",)), OutputBuffer(), signals, StandardInput())
    assert ended.status == 143
    assert signals.stopped_between_runs


def test_signals_are_as_before_when_it_is_over():
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    before = (
        [signal.getsignal(number) for number in numbers],
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
    )
    with SignalForwarder():
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert (
        [signal.getsignal(number) for number in numbers],
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
    ) == before
    assert [one.name for one in threading.enumerate() if one.name == "oomguard-signals"] == []
