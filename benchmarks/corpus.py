"""Figure: recall, false alarms, kinds, numbers, causes and calibration (95 % Wilson intervals) on
the labelled development set.

Needs ../shared beside the checkout (the records are not part of the repository). With -v each miss
is listed.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from support.commands import oomguard_command
from support.figure import conclude, skip

SHARED = Path(__file__).parents[2] / "shared"
GOALS = (  # key of the score, what it is called, goal in percent (false alarms: a count)
    ("recall", "verdict: recall", 99.0),
    ("false_alarms", "verdict: false alarms", 0),
    ("kind", "kind", 98.0),
    ("numbers", "printed numbers exact", 99.5),
    ("cause_evident", "cause first, evident", 92.0),
    ("cause_unclear", "cause acceptable elsewhere", 95.0),
)
GROUPS = ((0.8, 1.01, ">= 0.8"), (0.5, 0.8, "0.5-0.8"), (0.0, 0.5, "< 0.5"))
Z95 = 1.959964


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a share."""
    share = right / n
    z2 = Z95 * Z95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def said(records: list[dict]) -> list[tuple[float, bool]]:
    """Confidence and rightness of every cause in first place, chosen as the team's scorer chooses
    it.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i:05d}.log" for i in range(len(records))]
        for path, record in zip(paths, records, strict=True):
            path.write_text(record["text"])
        command = [*oomguard_command(), "diagnose", "--format", "json", *map(str, paths)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        answers = {answer["source"]: answer for answer in map(json.loads, run.stdout.splitlines())}
    out = []
    for path, record in zip(paths, records, strict=True):
        incidents = answers[str(path)]["incidents"]
        if not record["is_oom"] or "evidence_in_text" not in record:
            continue
        shown = [x for x in incidents if x["kind"] == record["kind"]] or incidents
        first = next(((x["causes"] or [{}])[0] for x in shown[:1]), {})
        if first.get("id") not in (None, "unknown"):
            accepted = {record["root_cause"], *record.get("acceptable_causes", [])}
            out.append((first["confidence"], first["id"] in accepted))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-v", "--verbose", action="store_true", help="list every miss")
    parser.add_argument(
        "--records",
        type=Path,
        default=SHARED / "corpus" / "dev.jsonl",
        help="other labelled records",
    )
    options = parser.parse_args()
    verbose = options.verbose
    scorer = SHARED / "checks" / "score_corpus.py"
    corpus = options.records.absolute()
    for needed in (scorer, corpus):
        if not needed.is_file():
            skip(f"{needed.name} is not beside this checkout")
    command = [sys.executable, str(scorer), shlex.join(oomguard_command()), str(corpus)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    print(run.stderr, end="", file=sys.stderr)
    score = json.loads(run.stdout)
    print(f"{score['records']} records, {score['answered']} answered, {score['numbers_n']} numbers")
    missed = []
    for key, name, goal in GOALS:
        value = score[key]
        met = value is not None and (value <= goal if key == "false_alarms" else value >= goal)
        missed += [] if met else [name]
        if key == "false_alarms":
            unit = ""
        else:
            unit = " %"
        print(
            f"{name:28} {value}{unit}  goal {'<=' if key == 'false_alarms' else '>='} {goal}{unit} "
            f" {'met' if met else 'NOT MET'}"
        )
    pairs = said([json.loads(line) for line in corpus.read_text().splitlines()])
    print("calibration  said        n   right   95 % interval    mean said")
    for low, high, name in GROUPS:
        group = [(confidence, right) for confidence, right in pairs if low <= confidence < high]
        if not group:
            print(f"             {name:8} {0:4}")
            continue
        n = len(group)
        right = sum(r for _, r in group)
        mean = sum(confidence for confidence, _ in group) / n
        lower, upper = wilson(right, n)
        if lower <= mean <= upper:
            verdict = "inside"
        else:
            verdict = "OUTSIDE"
        missed += [] if verdict == "inside" else [f"calibration {name}"]
        interval = f"{100 * lower:.1f}-{100 * upper:.1f} %"
        print(
            f"             {name:8} {n:4}  {100 * right / n:5.1f} %  {interval:15}  "
            f"{100 * mean:.1f} %  {verdict}"
        )
    if verbose:
        misses = Path(tempfile.gettempdir()) / "oomguard-misses.jsonl"
        print(misses.read_text())
    conclude(
        f"{corpus.stem}: {len(GOALS) + len(GROUPS) - len(missed)} of {len(GOALS) + len(GROUPS)} "
        "goals "
        f"(goal: all){', missed: ' if missed else ''}{', '.join(missed)}",
        met=not missed,
    )


if __name__ == "__main__":
    main()
