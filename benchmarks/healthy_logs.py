"""Figure: incidents found in healthy and unrelated logs, which are made by running real programs
here.

Nothing of it is kept in the repository. With --vllm the real vLLM for the CPU is started three
times as well (about two minutes; needs scripts/vllm-env). FOLDER keeps the logs; what is there
already is not run again.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from support.commands import ROOT, oomguard_command
from support.figure import conclude
from support.healthy_jobs import Job, jobs

FILES_GOAL = 500
MIB_GOAL = 100
WORKERS = 2
KERNEL_KILL = re.compile(rb"\] (Out of memory|Memory cgroup out of memory): Killed process \d+")


def make(folder: Path, minutes: float, every: int) -> None:
    """Run every job whose log is not there, or one in ``every``, until the time is over."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "pytest.ini").write_text("[pytest]\n")
    deadline = time.monotonic() + 60 * minutes
    with ThreadPoolExecutor(WORKERS) as pool:
        done = list(
            pool.map(
                lambda job: run(job, folder, scratch, deadline),
                islice(jobs(scratch), 0, None, every),
            )
        )
    for path in scratch.glob("traceback_*.log"):
        shutil.move(path, folder / "logs" / path.name)
    shutil.rmtree(scratch)
    for path in (folder / "logs").glob("system_*.log"):
        if KERNEL_KILL.search(path.read_bytes()):
            path.unlink()
            print(f"{path.name} left out: the kernel of this machine did kill a process for memory")
    if None in done:
        print(f"{done.count(None)} of {len(done)} programs were not started: the time was over")


def run(job: Job, folder: Path, scratch: Path, deadline: float) -> bool | None:
    """Run one program and keep what it prints; None where there was no time for it."""
    name, argv, limit_s = job
    path = folder / "logs" / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}.log"
    if path.is_file():
        return True
    if time.monotonic() > deadline:
        return None
    path.parent.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "COLUMNS": "120",
        "MANPAGER": "cat",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
    }
    new = path.with_suffix(f".{threading.get_ident()}")  # two programs may have one name
    with new.open("wb") as out:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=scratch,
                env=environment,
                start_new_session=True,
            )
        except OSError:
            new.unlink()
            return False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
    new.replace(path)
    return True


def serve_vllm(folder: Path) -> None:
    """Three healthy services of a tiny model, at several settings and log levels, with prompts that
    quote an error.
    """
    from support.healthy_vllm import LAUNCHES, launch

    for name, options, environment in LAUNCHES:
        path = folder / "logs" / f"vllm_{name}.log"
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            launch(path, ROOT, options, environment)


def scan(folder: Path) -> None:
    """Diagnose every log with the whole command and print each incident with its line."""
    paths = sorted(path for path in (folder / "logs").iterdir() if path.suffix == ".log")
    total = sum(path.stat().st_size for path in paths)
    began = time.monotonic()
    command = [*oomguard_command(), "diagnose", "--format", "json", str(folder / "logs")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if result.returncode:
        print(f"exit status {result.returncode}: {result.stderr[-2000:]}")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    found = [(answer["source"], incident) for answer in answers for incident in answer["incidents"]]
    for source, incident in found:
        line = incident["location"]["line"]
        with Path(source).open(encoding="utf-8", errors="replace") as stream:
            text = next((text for number, text in enumerate(stream, 1) if number == line), "")
        print(f"  {Path(source).name}:{line} {incident['kind']}: {text.strip()[:160]!r}")
    enough = len(paths) >= FILES_GOAL or total >= MIB_GOAL * 2**20
    if enough:
        size = "enough"
    else:
        size = f"few: {FILES_GOAL} files or {MIB_GOAL} MiB are enough"
    print(
        f"{len(paths)} files, {total / 2**20:.1f} MiB ({size}), {len(answers)} answered in "
        f"{seconds:.1f} s"
    )
    conclude(
        f"incidents: {len(found)} in {len({source for source, _ in found})} of {len(paths)} "
        "healthy files (goal 0)",
        met=not found and not result.returncode and len(answers) == len(paths),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="where the logs are kept (default: a temporary folder, removed)",
    )
    parser.add_argument(
        "--minutes", type=float, default=10, help="time for making the corpus (default 10)"
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run one program in N")
    parser.add_argument("--vllm", action="store_true", help="start the real vLLM too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        began = time.monotonic()
        make(folder, options.minutes, options.every)
        if options.vllm:
            serve_vllm(folder)
        print(f"made in {(time.monotonic() - began) / 60:.1f} minutes")
        scan(folder)


if __name__ == "__main__":
    main()
