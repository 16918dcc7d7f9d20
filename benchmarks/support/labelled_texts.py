"""Texts that are labelled as failures for memory or not: the team's corpora, look-alikes, the signatures' tests."""

import hashlib
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import engine_messages
import lookalikes
from oomguard.diagnosing import default_rules
from oomguard.kinds import NOT_OOM_KINDS
from oomguard.observe.scan import scan
from oomguard.observe.source import Line
from oomguard.rules.load import RuleSet
from support.figure import skip

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
CORPORA = ("dev", "dev2", "lookalikes")
# A signature's test is a message alone; in a log something goes before it and something comes after.
AMID_A_LOG = "job 4711 began\n{log}\njob 4711 is over, see its folder for the rest\n"


@dataclass(frozen=True)
class Labelled:
    """One text: where it is from, its thread, and whether a failure for memory stands in it."""

    group: str
    name: str
    text: str
    fails: bool


def labelled_texts() -> list[Labelled]:
    """All of them; ends the program where ../shared is not there."""
    found = []
    for corpus in CORPORA:
        path = SHARED / "corpus" / f"{corpus}.jsonl"
        if not path.is_file():
            skip(f"{path.relative_to(SHARED.parent)} is not beside this checkout")
        found += texts_of(path)
    for group in ("negatives", "positives"):
        fails = group == "positives"
        found += [Labelled("look-alikes", f"{c['style']}/{c['id']}", c["log"], fails) for c in lookalikes.cases(group)]
    engines = tomllib.loads(engine_messages.DATA.read_text(encoding="utf-8"))
    whole = {name: rows for name, rows in engines.items() if "versions" not in rows}
    for name, rows in whole.items():
        logs = [(log, True) for log, *_kinds in rows["failures"]] + [(log, False) for log in rows["others"]]
        found += [Labelled("engines", f"{name}-{number}", *row) for number, row in enumerate(logs)]
    rules = default_rules()
    for signature in rules.signatures:
        for number, test in enumerate(signature.tests):
            fails = not test.get("expect_no_match") and signature.kind not in {None, *NOT_OOM_KINDS}
            if fails or (test.get("expect_no_match") and not _is_failure(test["log"], rules)):
                name = f"{signature.name}-{number}"
                found.append(Labelled("tests of signatures", name, test["log"], fails))
                found.append(Labelled("the same amid a log", f"{name}-1", AMID_A_LOG.format(log=test["log"]), fails))
    return found


def texts_of(path: Path) -> list[Labelled]:
    """The labelled texts of a set, each once: a file of JSON lines, or a folder of such files, which gives the set its name."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    records = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    texts = {record["text"]: record for record in records if "is_oom" in record}
    return [Labelled(path.stem, record["id"], text, bool(record["is_oom"])) for text, record in texts.items()]


def _is_failure(log: str, rules: RuleSet) -> bool:
    """Whether another signature takes a text that is none of the one that it is a test of."""
    return any(incident.is_oom for incident in scan(lines_of(log), rules).incidents)


def lines_of(text: str) -> list[Line]:
    """The lines of a text, numbered."""
    return [Line(number, 0, line) for number, line in enumerate(text.split("\n"), 1)]


def half_of(name: str) -> int:
    """Which half of the texts one belongs to: 0 or 1, the same for all excerpts of a thread."""
    thread = re.sub(r"-\w+$", "", name)
    return int(hashlib.sha256(thread.encode()).hexdigest(), 16) % 2
