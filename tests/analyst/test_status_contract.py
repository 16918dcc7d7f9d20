"""The exit status and the output are the command's own, whatever happens inside oomguard or to its files."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import oomguard
from support.faults import KINDS, SCENARIOS, problem, reached
from support.supervising import LIMIT_S, RUN, left, marked, wait_for
from support.supervising import hooked as hooked_here

LOG = Path(__file__).parents[2] / "examples" / "logs" / "vllm_serve_kv_cache.log"
FAULTS = 16


def hooked(folder: Path, code: str) -> dict[str, str]:
    """Return an environment in which each Python of oomguard runs ``code`` as it starts, with folders of its own."""
    return {
        **hooked_here(folder, code),
        "XDG_STATE_HOME": str(folder / "state"),
        "TMPDIR": str(folder),
    }


def run(
    code: str, env: dict[str, str], *options: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    command = [*RUN, *options, "--", "sh", "-c", code]
    return subprocess.run(
        command,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=LIMIT_S,
        check=False,
        env=env,
        cwd=cwd,
    )


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_fault_in_any_function_keeps_status_and_output(scenario, tmp_path):
    """A sample; ``benchmarks/run_faults.py`` tries all of them."""
    found = reached(scenario, tmp_path)
    own = [one for one in found if one[0].startswith("supervisor/")]
    chosen = random.Random(f"{scenario.name} {os.environ.get('GITHUB_RUN_ID', '')}")
    picked = [*chosen.sample(own, FAULTS // 4), *chosen.sample(found, FAULTS // 4)]
    for number, (function, call) in enumerate(picked):
        place = tmp_path / str(number)
        place.mkdir()
        fault = {"function": function, "call": call, "kind": KINDS[number % len(KINDS)]}
        assert problem(scenario, fault, place) is None, fault


@pytest.mark.parametrize("status", [0, 9])
def test_oomguard_may_be_removed_while_its_command_runs(status, tmp_path):
    package = tmp_path / "copy" / "oomguard"
    shutil.copytree(
        Path(oomguard.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    env = {
        **os.environ,
        "PYTHONPATH": str(package.parent),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    code = f"echo BEGUN; while [ -e {package}/__init__.py ]; do sleep 0.05; done; exit {status}"
    command = [sys.executable, "-m", "oomguard", "run", "--", "sh", "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env=env
    ) as process:
        assert process.stdout.readline() == b"BEGUN\n"
        package.rename(tmp_path / "old")
        errors = process.communicate(timeout=LIMIT_S)[1]

    assert process.returncode == status
    assert b"Traceback" not in errors
    assert (b"oomguard could not explain the failure" in errors) == bool(status)


def test_broken_rule_file_does_not_affect_the_command(tmp_path):
    (tmp_path / "rules" / "causes").mkdir(parents=True)
    code = f"echo garbage > {tmp_path}/rules/causes/y.toml; exit 9"
    ran = run(code, hooked(tmp_path, ""), "--rules", str(tmp_path / "rules"))
    assert ran.returncode == 9


SHORT = "import oomguard.supervisor.loop as a\na.ANSWER_LIMIT_S = 2.0\n"
FAILING = {
    "hangs": "import oomguard.analyst.attempt_diagnosis as e, time\ne.AttemptDiagnoser.read_output = lambda *_: time.sleep(3600)\n",
    "kills itself": "import oomguard.analyst.attempt_diagnosis as e, os\ne.AttemptDiagnoser.read_output = lambda *_: os.kill(os.getpid(), 9)\n",
    "exits": "import oomguard.analyst.attempt_diagnosis as e, os\ne.AttemptDiagnoser.read_output = lambda *_: os._exit(3)\n",
    "talks nonsense": "import oomguard.analyst.attempt_diagnosis as e, oomguard.analyst.link as l\n"
    "e.AttemptDiagnoser.read_output = lambda *_: (l.current_link().channel.sendall(b'{\"say\": 1}\\n'), __import__('time').sleep(9))\n",
    "cannot be loaded": "import sys\nsys.modules['oomguard.cli.analyst'] = None\n",
}


@pytest.mark.parametrize("how", FAILING)
def test_failed_analyst_is_one_line_and_the_status_stays(how, tmp_path):
    ran = run(
        f"cat {LOG}; exit 7", hooked(tmp_path, SHORT + FAILING[how]), "--allow", "reduces-capacity"
    )

    assert (ran.returncode, ran.stdout) == (7, LOG.read_bytes())
    said = [
        line
        for line in ran.stderr.decode().splitlines()
        if "oomguard could not explain the failure" in line
    ]
    assert len(said) == 1, ran.stderr
    assert Path(said[0].rpartition("output=")[2]).read_bytes() == LOG.read_bytes()


@pytest.mark.parametrize("signals", [1, 3])
def test_stop_signal_ends_the_run_within_two_seconds(signals, tmp_path):
    mark = f"analysis-{os.getpid()}-{signals}"
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'analyzes')!r})"
    hang = FAILING["hangs"].replace(
        "lambda *_: ", f"lambda *_: open({str(tmp_path / 'now')!r}, 'w').close() or "
    )
    env = marked(mark, hooked(tmp_path, f"{code}\n{hang}"))
    with subprocess.Popen(
        [*RUN, "--", "sh", "-c", "exit 7"], stderr=subprocess.DEVNULL, env=env
    ) as process:
        assert wait_for((tmp_path / "now").exists)
        began_s = time.monotonic()
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        status = process.wait(timeout=LIMIT_S)
        took_s = time.monotonic() - began_s

    assert status == 128 + signal.SIGTERM
    assert took_s < 2.5
    assert wait_for(lambda: left(mark) == [])


def test_a_killed_analyst_leaves_the_command_alone(tmp_path):
    env = hooked(tmp_path, "")
    command = [
        *RUN,
        "--",
        "sh",
        "-c",
        f"echo BEGUN; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; exit 6",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as process:
        assert process.stdout.readline() == b"BEGUN\n"

        def analysts() -> list[psutil.Process]:
            children = psutil.Process(process.pid).children()
            return [one for one in children if one.name().startswith("oomguard-analys")]

        assert wait_for(lambda: bool(analysts()))
        analysts()[0].kill()
        (tmp_path / "go").touch()
        errors = process.communicate(timeout=LIMIT_S)[1]

    assert process.returncode == 6
    assert errors.startswith(
        b'oomguard: oomguard could not explain the failure: reason="it ended without an answer"'
    )
