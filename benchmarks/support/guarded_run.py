"""One tester's script that starts vLLM under a guard of its own: what was seen, without
a verdict.
"""

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from support.commands import ROOT
from support.stranger_case import written_text
from support.stranger_run import run_case

_OBSERVING = Path(__file__).with_name("observing")


def with_permission(case: dict[str, Any]) -> dict[str, Any]:
    """Return the case with what its script permits, where the judge looks for it."""
    return case | {
        "allow": re.findall(r"allow[\"']?\s*[=:]\s*\\?[\"']?([a-z]+-[a-z-]+)", written_text(case))
    }


def observe_guarded(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case's script to its end; no process of it is left."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        told = folder / "told.jsonl"
        env = {"GUARD_TOLD": str(told), "PYTHONPATH": os.pathsep.join((str(_OBSERVING), str(ROOT)))}
        seen, stdout, _ = run_case(case["command"], case, folder, env)
        if told.is_file():
            rows = [json.loads(line) for line in told.read_text().splitlines()]
        else:
            rows = []
    # A script that is to get the exception back runs when it has caught it; its engine does not.
    handed_back = "unfixable" in case["causes"] and seen["runs"]
    incidents = [row for row in rows if "cause" in row]
    started = [row for row in rows if "attempt" in row]
    return seen | {
        "runs": seen["runs"] and not handed_back,
        "handed_back": handed_back,
        "relaunches": sum(row["attempt"] > 1 for row in started),
        "cause": incidents[0]["cause"] if incidents else None,
        "is_oom": bool(incidents) and incidents[0]["is_oom"],
        "attempts": [row["settings"] for row in started if row["failed"] or row["attempt"] > 1],
        "patches": [row["patch"] for row in rows if "patch" in row],
        "printed": re.findall(r"^(?:VALUE|ENGINE) .*$", stdout, re.MULTILINE),
    }
