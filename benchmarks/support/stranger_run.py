"""One tester's case under `oomguard run`: what was seen, without a verdict."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.commands import ROOT, oomguard_command
from support.stranger_case import make_folder
from support.supervising import MARK, left, wait_for

BINARIES = ROOT / ".venv-vllm" / "bin"
END_S = 45  # what a server may take to end once it was asked to
_HEADING = re.compile(r"# (?:or )?[a-z_]+ \S")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def observe(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case to its end, a server until it answers; no process of it is left."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        journal = folder / "journal.sqlite3"
        command = [
            *oomguard_command(),
            "run",
            "--journal",
            str(journal),
            *case["allow"],
            "--",
            *case["command"],
        ]
        seen, stdout, stderr = run_case(command, case, folder)
        seen |= _journalled(journal)
        lines = stdout.splitlines()
        seen["printed"] = [
            line[:200] for line in lines if re.match(r"[A-Z-]+( \w+)? \d+$", line)
        ]  # what scripts tell
        seen["to_paste"] = _to_paste(stderr.splitlines())
        seen["own_lines"] = [
            line[:200] for line in stderr.splitlines() if line.startswith(("oomguard:", "╭"))
        ]
        return seen


def start(case: dict[str, Any], command: list[str]) -> dict[str, Any]:
    """Run a command in a case's place, without oomguard; no process of it is left."""
    with tempfile.TemporaryDirectory() as temporary:
        return run_case(command, case, Path(temporary))[0]


def run_case(
    command: list[str], case: dict[str, Any], folder: Path, env: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], str, str]:
    """Run a command in a case's place, with variables beside the case's own; return what was seen,
    and both streams.
    """
    make_folder(case, folder / "work")
    mark = uuid.uuid4().hex
    began = time.monotonic()
    seen = _run(
        command, case, folder, {**_environment(case, folder), **(env or {}), MARK: mark}, mark
    )
    seen["seconds"] = round(time.monotonic() - began, 1)
    stdout, stderr = (
        _ANSI.sub("", (folder / name).read_text(errors="replace")) for name in ("stdout", "stderr")
    )
    if case["healthy"]["kind"] == "exit":
        seen["runs"] = _ended_well(case["healthy"], seen["status"], stdout, folder / "work")
    if seen["runs"]:
        seen["error"] = ""
    else:
        seen["error"] = (stdout + stderr)[-1500:]
    return seen, stdout, stderr


def _to_paste(lines: list[str]) -> list[tuple[str, str]]:
    """Return what was printed to be pasted: what it changes, and the command."""
    headed = (
        (line, following)
        for line, following in itertools.pairwise(lines)
        if not following.startswith("#")
    )
    return [(line[2:], following) for line, following in headed if _HEADING.match(line)]


def _environment(case: dict[str, Any], folder: Path) -> dict[str, str]:
    """Return the tester's environment: that of .venv-vllm, without settings of whoever
    runs this.
    """
    ours = ("OOMGUARD_", "VLLM_", "PYTHON")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ours) or name == "PYTHONPATH"
    }
    (folder / "rpc").mkdir()
    return {
        **kept,
        "PATH": f"{BINARIES}{os.pathsep}{kept['PATH']}",
        "XDG_CONFIG_HOME": str(folder / "no-config"),
        "COLUMNS": "100",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_RPC_BASE_PATH": str(folder / "rpc"),  # an engine that is killed leaves its sockets
        **case["env"],
    }


def _run(
    command: list[str], case: dict[str, Any], folder: Path, env: Mapping[str, str], mark: str
) -> dict[str, Any]:
    """Start the command and wait: for its end, for a server's answer, or for the tester's time
    limit.
    """
    if case["healthy"]["kind"] == "health":
        port = int(case["port"])
    else:
        port = None
    if port is not None and not _is_free(port):
        raise SystemExit(
            f"{case['name']}: port {port} is in use; another server would answer in its place"
        )
    seen: dict[str, Any] = {
        "runs": False,
        "timed_out": False,
        "served_max_model_len": None,
        "left": 0,
    }
    limit = time.monotonic() + case["timeout"]
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        try:
            process = subprocess.Popen(
                [*_first_to_go(), *command],
                cwd=folder / "work",
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            while process.poll() is None and time.monotonic() < limit and not seen["runs"]:
                time.sleep(0.5)
                if port is not None and _is_healthy(port):
                    seen |= {"runs": True, "served_max_model_len": _served_length(port)}
            seen["timed_out"] = process.poll() is None and not seen["runs"]
            if process.poll() is None:
                time.sleep(2 if seen["runs"] else 0)
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            if process.poll() is not None:
                time.sleep(1)
                seen["left"] = len(left(mark))
        finally:
            _end_all(mark)
        seen["status"] = process.wait()
    return seen


def _first_to_go() -> list[str]:
    """Return a prefix by which the kernel ends this before anybody else's process, should memory
    run out.
    """
    return ["sh", "-c", 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"', "sh"]


def _end_all(mark: str) -> None:
    for number, limit_s in ((signal.SIGTERM, 8), (signal.SIGKILL, 4)):
        for pid in left(mark):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        if wait_for(lambda: not left(mark), limit_s):
            return


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def _served_length(port: int) -> int | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
            return json.load(answer)["data"][0].get("max_model_len")
    except (OSError, ValueError, LookupError):
        return None


def _ended_well(wanted: dict[str, Any], status: int, stdout: str, work: Path) -> bool:
    """Tell whether a command that ends did what the tester asks of it; a traceback that quotes the
    marker is none.
    """
    if status != wanted["status"] or (
        wanted["file"] is not None and not _all_answered(work / wanted["file"])
    ):
        return False
    lines = stdout.splitlines() + (
        (work / wanted["file"]).read_text().splitlines() if wanted["file"] else []
    )
    return wanted["marker"] is None or any(
        wanted["marker"] in line and "print(" not in line for line in lines
    )


def _all_answered(batch: Path) -> bool:
    """Tell whether every request of a batch has an answer and no error."""
    try:
        rows = [json.loads(line) for line in batch.read_text().splitlines() if line.strip()]
    except (OSError, ValueError):
        return False
    return bool(rows) and all(
        not row.get("error") and (row.get("response") or {}).get("status_code") == 200
        for row in rows
    )


def _journalled(journal: Path) -> dict[str, Any]:
    """Return what oomguard kept of its attempts: the first cause, and all that it changed."""
    from oomguard.journal.store import Journal

    records = Journal(journal).records()
    if records:
        incident = records[0].incident
    else:
        incident = None
    patches = [patch for record in records for patch in record.patches]
    return {
        "relaunches": max(len(records) - 1, 0),
        "cause": incident["causes"][0]["id"] if incident else None,
        "is_oom": bool(incident and incident["is_oom"]),
        "attempts": [dict(record.settings) for record in records],
        "patches": [
            {key: patch[key] for key in ("setting", "from", "to", "effect")} for patch in patches
        ],
    }
