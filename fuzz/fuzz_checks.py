# ruff: noqa: S101 (assertions are what a fuzzer looks for)
"""What has to hold whatever comes in: no exception but RuleError, every input within its time, valid JSON out."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path
from typing import Any
from unittest import mock

from oomguard.core.errors import RuleError
from oomguard.core.incident import CAUSES, KINDS, PHASES
from oomguard.diagnosis import diagnose_lines
from oomguard.report.json import to_json
from oomguard.rules.rule_files import RuleSet, load_rules
from oomguard.scan.source import read_lines

LIMIT_S = 2.0  # processor time of one input: a search has half a second, and a hostile text may use up a few


def check_log(text: str, rules: RuleSet | None = None, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Diagnose a text; returns the JSON answer, which keeps the contract."""
    began = time.thread_time()
    diagnosis = diagnose_lines(
        read_lines(io.BytesIO(text.encode("utf-8", "surrogatepass"))), rules=rules
    )
    line = to_json(diagnosis)
    took = time.thread_time() - began
    assert took <= limit_s, f"{took:.2f} s for {len(text)} characters"
    return check_line(line)


def check_line(line: str) -> dict[str, Any]:
    """One line of output: strict JSON that UTF-8 can carry, with the values of the contract."""
    assert "\n" not in line
    line.encode("utf-8")
    answer: dict[str, Any] = json.loads(line, parse_constant=_no_constant)
    assert answer["schema"] == 1
    assert answer["verdict"] == (
        "oom" if any(i["is_oom"] for i in answer["incidents"]) else "no_oom"
    )
    for incident in answer["incidents"]:
        assert incident["kind"] in KINDS
        assert incident["phase"] in PHASES
        assert incident["repeated"] >= 1
        assert incident["location"]["line"] >= 1
        assert incident["causes"], "an incident without a cause, not even unknown"
        for cause in incident["causes"]:
            assert cause["id"] in CAUSES
            assert 0 <= cause["confidence"] <= 1
        confidences = [cause["confidence"] for cause in incident["causes"]]
        assert confidences == sorted(confidences, reverse=True)
        for name, value in incident["facts"].items():
            assert not isinstance(value, float) or math.isfinite(value), name
            assert value is not None, name
    return answer


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def check_rule_file(folder: Path, content: bytes) -> RuleSet | None:
    """Load a folder with this one rule file: the rules, or None after a RuleError that names the file.

    Rules that were accepted are then used on the anchors and logs in them. The shipped rules are left out: they would
    be read again each time.
    """
    path, empty = folder / "rules" / "mutated.toml", folder / "none"
    path.parent.mkdir(exist_ok=True)
    empty.mkdir(exist_ok=True)
    path.write_bytes(content)
    refusal = None
    began = time.thread_time()
    try:
        with mock.patch("oomguard.rules.rule_files.shipped_root", return_value=empty):
            rules = load_rules([path.parent])
    except RuleError as error:
        rules, refusal = None, error
    took = time.thread_time() - began
    assert took <= LIMIT_S, f"{took:.2f} s to load {len(content)} bytes"
    if refusal is not None:
        assert refusal.path == str(path)
        assert str(refusal).startswith(str(path))
    for signature in rules.signatures if rules else ():
        anchors = "\n".join(
            f"RuntimeError: {w.anchor} 2.00 GiB {'a' * 300} {w.anchor}" for w in signature.wordings
        )
        logs = [str(test.get("log", "")) for test in signature.tests]
        # every wording may use up its time once, and is left out from then on
        check_log(
            "\n".join([*logs[:3], anchors])[:8192] + "\n", rules, LIMIT_S + len(signature.wordings)
        )
    return rules
