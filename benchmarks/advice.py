"""Figure: how often the first action is one that an expert accepts, with its value, on the labelled
development sets.

Two people who had read no rule labelled each failure from its text alone
(data/advice_labels.jsonl): the accepted first actions of both, without those that one of them calls
harmful. Needs ../shared beside the checkout, which has the texts and the scorer. With -v each
failure whose first action is not accepted is listed.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from support.commands import ROOT, oomguard_command
from support.figure import conclude, skip

SHARED = ROOT.parent / "shared"
LABELS = ROOT / "benchmarks" / "data" / "advice_labels.jsonl"
GOAL_ACCEPTED, GOAL_SOLVED = (
    95.0,
    70.0,
)  # percent; and none without an action, none that begins with a harmful one


def labelled(shared: Path) -> list[dict]:
    """Return the records of both development sets that have labels, with their labels."""
    labels = {row["id"]: row for row in map(json.loads, LABELS.read_text().splitlines())}
    texts = (shared / "corpus" / name for name in ("dev.jsonl", "dev2.jsonl"))
    records = [json.loads(line) for path in texts for line in path.read_text().splitlines()]
    return [record | labels[record["id"]] for record in records if record["id"] in labels]


def scored(shared: Path) -> tuple[dict, list[dict]]:
    """Return the scorer's figures and its cases."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records.jsonl"
        records.write_text("".join(f"{json.dumps(record)}\n" for record in labelled(shared)))
        scorer = shared / "checks" / "score_advice.py"
        command = [sys.executable, str(scorer), shlex.join(oomguard_command()), str(records)]
        env = {**os.environ, "TMPDIR": folder}
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        cases = (Path(folder) / "oomguard-advice.jsonl").read_text().splitlines()
        return json.loads(run.stdout), [json.loads(line) for line in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="list each first action that is not accepted"
    )
    options = parser.parse_args()
    if not (SHARED / "corpus" / "dev.jsonl").is_file():
        skip("the labelled texts are not here")
    figures, cases = scored(SHARED)
    for case in cases if options.verbose else ():
        if case["grade"] in {"unhelpful", "none", "bad"} or case["bad"]:
            print(
                f"  {case['id']}: {case['grade']}: {case['first']}, accepted: "
                f"{', '.join(case['accepted'])}"
            )
    accepted = figures["right_or_solved"]
    solved = figures["solved"]
    conclude(
        f"of {figures['failures']} failures the first action is accepted in {accepted} % (goal >= "
        f"{GOAL_ACCEPTED:.0f}), "
        f"with its value in {solved} % (goal >= {GOAL_SOLVED:.0f}); without an action "
        f"{figures['none']}, "
        f"harmful first {figures['bad_first']}, harmful anywhere {figures['bad_anywhere']}",
        met=accepted >= GOAL_ACCEPTED
        and solved >= GOAL_SOLVED
        and not figures["none"]
        and not figures["bad_first"],
    )


if __name__ == "__main__":
    main()
