"""A command that failed is not run again by itself where that would repeat what it did to the outside world."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Fails in vLLM's words until its length is lowered, then prints its result.
FAILS = f"import runpy, sys; sys.argv = ['x']; runpy.run_path({str(HERE / 'fake_engine.py')!r})\n"
ACCESS = "print('INFO:     127.0.0.1:1 - \"POST /v1/completions HTTP/1.1\" 200 OK', flush=True)\n"
RUN = (sys.executable, "-m", "oomguard", "run")
REFUSED = "Not retried, because it would repeat its side effects"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The command's working folder; it lies below the temporary folder, and counts all the same."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def run(
    work: Path,
    body: str,
    *options: str,
    arguments: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    script = work.parent / "script.py"
    script.write_text(body + "\n" + FAILS)
    return started([*RUN, *options, "--", sys.executable, str(script), *arguments], work, env)


def started(
    command: list[str], work: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    variables = {
        **os.environ,
        "PYTHONPATH": str(HERE.parents[1]),
        "TMPDIR": str(work.parent),
        **(env or {}),
    }
    return subprocess.run(
        command, cwd=work, capture_output=True, text=True, timeout=200, check=False, env=variables
    )


def test_what_wrote_nothing_is_run_again_and_that_is_said(work):
    ran = run(work, "")

    assert ran.returncode == 0, ran.stderr
    assert "The command can run again, because oomguard saw no file being written" in ran.stderr
    assert 'failed="while the engine started"' in ran.stderr


WRITES = {
    "appends": "open('results.jsonl', 'a').write('one\\n')",
    "by a child": "import subprocess; subprocess.run(['sh', '-c', 'echo one >> results.jsonl'])",
}


@pytest.mark.parametrize("way", WRITES)
def test_what_wrote_a_file_is_not_run_again(way, work):
    ran = run(work, WRITES[way])

    assert ran.returncode == 1
    assert "RESULT" not in ran.stdout
    assert REFUSED in ran.stderr
    assert f"The command wrote a file: path={work}/" in ran.stderr
    assert "results.jsonl known=" in ran.stderr


def test_the_command_to_paste_runs_it_again_all_the_same(work):
    ran = run(work, "open('results.jsonl', 'a').write('one\\n')")
    (line,) = [line for line in ran.stderr.splitlines() if "To run it again anyway" in line]
    again = started(["sh", "-c", line.partition("command=")[2]], work)

    assert "RESULT 1792" in again.stdout


HARMLESS = {
    "a cache": "import os; p = os.environ['XDG_CACHE_HOME']; os.makedirs(p, exist_ok=True); open(p + '/x', 'w').write('1')",
    "a cache of the hub": "import os; p = os.environ['HF_HOME']; os.makedirs(p, exist_ok=True); open(p + '/x', 'w').write('1')",
    "a cache of the engine": "import os; p = os.environ['VLLM_CACHE_ROOT']; os.makedirs(p, exist_ok=True); open(p + '/x', 'w').write('1')",
    "compiled code": "import os; os.makedirs('__pycache__', exist_ok=True); open('__pycache__/x.pyc', 'w').write('1')",
    "a log": "open('run.log', 'a').write('started')",
    "a lock": "open('x.lock', 'w').write('1')",
    "a temporary file": "import tempfile; file = tempfile.NamedTemporaryFile(delete=False); file.write(b'1'); file.flush()",
    "a temporary file here": "import tempfile; file = tempfile.NamedTemporaryFile(dir='.', delete=False); file.write(b'1')",
    "a file that is gone": "import os; open('x', 'w').write('1'); os.remove('x')",
    "a file without a name": "import tempfile; file = tempfile.TemporaryFile(dir='.'); file.write(b'1'); file.flush()",
    "memory": "file = open('/dev/shm/oomguard-test', 'w'); file.write('1'); file.flush(); import os; os.remove(file.name)",
    "an empty file": "file = open('results.jsonl', 'a')",
    "reading": "open('input.txt').read()",
    "opened and left alone": "file = open('input.txt', 'r+'); file.read()",
}


def test_what_can_be_written_again_does_not_stand_in_the_way(work):
    (work / "input.txt").write_text("prompts")
    caches = {
        name: str(work / name.lower()) for name in ("XDG_CACHE_HOME", "HF_HOME", "VLLM_CACHE_ROOT")
    }
    ran = run(work, "\n".join(HARMLESS.values()), env=caches)

    assert ran.returncode == 0, ran.stderr
    assert "oomguard saw no file being written" in ran.stderr


def test_open_file_of_a_process_counts_in_any_folder(work):
    """It lies too deep to be found by looking around; what the command leaves running is looked at before it is ended."""
    held = work / "a" / "b" / "results.jsonl"
    held.parent.mkdir(parents=True)
    child = f"file = open({str(held)!r}, 'w'); file.write('one'); file.flush(); print(flush=True); import time; time.sleep(600)"
    body = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, start_new_session=True)\n"
        "child.stdout.readline()\n"
    )
    ran = run(work, body)

    assert ran.returncode == 1
    assert f'path={held} known="one of its processes had the file open for writing"' in ran.stderr


def test_the_file_that_the_output_goes_to_does_not_count(work):
    script = work.parent / "script.py"
    script.write_text(FAILS)
    line = shlex.join([*RUN, "--", sys.executable, str(script)])
    started(["sh", "-c", f"{line} > out.txt"], work)

    assert "RESULT 1792" in (work / "out.txt").read_text()


def test_what_served_requests_is_not_run_again(work):
    ran = run(work, ACCESS * 3)

    assert ran.returncode == 1
    assert REFUSED in ran.stderr
    assert "The command served requests: at_least=3" in ran.stderr


def test_engines_server_restarts_after_requests_and_files(work):
    """It answers those who ask; started again, it repeats none of that."""
    server = work.parent / "bin" / "vllm"
    server.parent.mkdir()
    server.write_text(
        f"#!{sys.executable}\n{ACCESS}open('seen.jsonl', 'a').write('one')\n"
        f"import runpy, sys; sys.argv = ['x', *sys.argv[3:]]; runpy.run_path({str(HERE / 'fake_server.py')!r})\n"
    )
    server.chmod(0o755)
    command = [*RUN, "--allow", "reduces-capacity", "--", str(server), "serve", "./none"]
    ran = started(command, work)

    assert ran.returncode == 0, ran.stderr
    assert (
        'The command can run again, because a restarted server does not repeat requests: failed="after the engine was up"'
        in ran.stderr
    )
    assert "The command served requests: at_least=1" in ran.stderr


WROTE = "open('results.jsonl', 'a').write('one\\n')"


def test_idempotent_permits_it_and_what_is_repeated_is_said(work):
    ran = run(work, WROTE, "--idempotent")

    assert ran.returncode == 0
    assert (
        "The command can run again, because --idempotent permits repeating its side effects"
        in ran.stderr
    )
    assert f"The command wrote a file: path={work / 'results.jsonl'}" in ran.stderr


def test_variable_permits_it_and_a_strangers_table_does_not(work):
    assert run(work, WROTE, env={"OOMGUARD_IDEMPOTENT": "1"}).returncode == 0

    (work / "pyproject.toml").write_text("[tool.oomguard]\nidempotent = true\n")
    ran = run(work, WROTE)
    assert ran.returncode == 1
    assert (
        "ignored idempotent: only a flag, OOMGUARD_IDEMPOTENT or your own file can set it"
        in ran.stderr
    )


OWN = (
    "--metrics",
    "link.prom",
    "--journal",
    "a.sqlite3",
    "--report",
    "a.json",
    "--termination-message",
    "a.txt",
)


def test_oomguards_own_files_are_no_side_effect(work):
    (work / "link.prom").symlink_to("target.prom")
    ran = run(work, "", *OWN)

    assert ran.returncode == 0, ran.stderr
    assert "oomguard saw no file being written" in ran.stderr
