"""Faults inside oomguard: which functions a run reaches, by a trace, and runs in which one of them
fails.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import oomguard

PACKAGE = Path(oomguard.__file__).parent
LOG = Path(__file__).parents[2] / "examples" / "logs" / "vllm_serve_kv_cache.log"
KINDS = ("exception", "exit", "hang", "memory")
LIMIT_S = 60
# What runs before oomguard's first function does: nothing of it can be watched from inside.
BEFORE = (
    "__init__.py:<module>",
    "__main__.py:<module>",
    "__main__.py:main:",
)
# A Python reads this file as it starts: the supervisor, its forks and the analyst are such.
HOOK = """
import json, os, sys, threading, time

_fault = json.loads(os.environ["OOMGUARD_FAULT"])
_package = _fault["package"] + os.sep
_seen = {}
_log = os.open(_fault["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT) if "log" in _fault else -1
_shorter = {
    "oomguard.supervisor.failsafe": {"TICK_S": 0.2},
    "oomguard.supervisor.loop": {"ANSWER_LIMIT_S": 4.0},
    "oomguard.supervisor.reaper": {"_START_S": 2.0, "_REAP_S": 1.0},
}


def _profile(frame, event, _argument):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(_package):
        return
    if _shorter:
        for name in [name for name in _shorter if name in sys.modules]:
            ready = all(hasattr(sys.modules[name], key) for key in _shorter[name])
            if ready:
                vars(sys.modules[name]).update(_shorter.pop(name))
    key = f"{code.co_filename[len(_package):]}:{code.co_qualname}:{code.co_firstlineno}"
    _seen[key] = _seen.get(key, 0) + 1
    if _log >= 0:
        if _seen[key] in (1, 3):
            os.write(_log, f"{key} {_seen[key]}\\n".encode())
        return
    if key == _fault["function"] and _seen[key] == _fault["call"]:
        kind = _fault["kind"]
        if kind == "exception":
            raise RuntimeError("injected")
        if kind == "exit":
            raise SystemExit(9)
        if kind == "memory":
            raise MemoryError
        while True:
            time.sleep(3600)


threading.setprofile(_profile)
sys.setprofile(_profile)
"""


@dataclass(frozen=True)
class Scenario:
    """A run: what it prints on standard output in any case, and the exit statuses that are the
    command's own.
    """

    name: str
    options: tuple[str, ...]
    code: str
    prints: bytes
    statuses: frozenset[int]

    def command(self, folder: Path) -> list[str]:
        options = [word.format(folder=folder) for word in self.options]
        return [sys.executable, "-m", "oomguard", "run", *options, "--", "sh", "-c", self.code]


FAILS = f'cat "{LOG}" >&2; echo BEFORE; exit 7'
SCENARIOS = (
    Scenario("ends well", (), "echo BEFORE; sleep 0.7; exit 0", b"BEFORE\n", frozenset({0})),
    Scenario("fails", (), FAILS, b"BEFORE\n", frozenset({7})),
    Scenario(
        "runs again",
        (
            "--allow",
            "reduces-capacity",
            "--journal",
            "{folder}/journal",
            "--report",
            "{folder}/report.json",
        ),
        f'if [ -n "$OOMGUARD_VLLM_OVERRIDES" ]; then echo AGAIN; exit 5; fi; {FAILS}',
        b"BEFORE\n",
        frozenset({5, 7}),
    ),
)


def run_with(scenario: Scenario, fault: dict, folder: Path) -> subprocess.CompletedProcess:
    """Run a scenario with a fault, in a folder of its own."""
    (folder / "hook").mkdir(parents=True, exist_ok=True)
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(folder / "hook"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "OOMGUARD_FAULT": json.dumps({"package": str(PACKAGE), **fault}),
        "XDG_STATE_HOME": str(folder / "state"),
        "TMPDIR": str(folder),
    }
    return subprocess.run(
        scenario.command(folder),
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )


def reached(scenario: Scenario, folder: Path) -> list[tuple[str, int]]:
    """Return the functions of oomguard that a run reaches, each with the calls at which it is to
    fail: the first, a later one.
    """
    log = folder / "trace"
    run_with(scenario, {"log": str(log)}, folder)
    found = {tuple(line.rsplit(" ", 1)) for line in log.read_text().splitlines()}
    return sorted(
        (function, int(call)) for function, call in found if not function.startswith(BEFORE)
    )


def problem(scenario: Scenario, fault: dict, folder: Path) -> str | None:
    """Return what is wrong with a run that has a fault; None where status and output are the
    command's own.
    """
    try:
        ran = run_with(scenario, fault, folder)
    except subprocess.TimeoutExpired:
        return "the run did not end"
    if ran.returncode not in scenario.statuses:
        return f"status {ran.returncode}: {ran.stderr[-300:].decode(errors='replace')}"
    if scenario.prints in ran.stdout:
        return None
    return f"standard output {ran.stdout!r}"
