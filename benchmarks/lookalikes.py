"""Figure: false alarms on texts that only quote memory errors, and recall on real failures that
resemble them.

The texts are tests/lookalikes/*/*.toml; each becomes one file, and the whole command reads them
all. With -v every miss is listed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from support.figure import conclude

CASES = Path(__file__).parents[1] / "tests" / "lookalikes"
FALSE_ALARM_GOAL = 0.05
RECALL_GOAL = 0.95


@dataclass(frozen=True)
class Figures:
    """Counts, and one line for every case that was answered wrongly."""

    negatives: int
    false_alarms: tuple[str, ...]
    incidents: int
    positives: int
    missed: tuple[str, ...]
    other_kind: tuple[str, ...]

    @property
    def false_alarm_ratio(self) -> float:
        return len(self.false_alarms) / self.negatives

    @property
    def recall_ratio(self) -> float:
        return 1 - len(self.missed) / self.positives


def cases(group: str) -> list[dict]:
    """Every case of ``negatives`` or ``positives``, with its style (the file's name)."""
    return [
        {**case, "style": path.stem}
        for path in sorted((CASES / group).glob("*.toml"))
        for case in tomllib.loads(path.read_text(encoding="utf-8"))["case"]
    ]


def diagnose(texts: list[str]) -> list[dict]:
    """What the command says about each text, in order."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i:04d}.log" for i in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text, encoding="utf-8", newline="")
        command = [
            sys.executable,
            "-m",
            "oomguard",
            "diagnose",
            "--format",
            "json",
            *map(str, paths),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        answers = {answer["source"]: answer for answer in map(json.loads, run.stdout.splitlines())}
        return [answers[str(path)] for path in paths]


def measure() -> Figures:
    """Read every case with the whole command."""
    negatives = cases("negatives")
    positives = cases("positives")
    answers = diagnose([case["log"] for case in negatives + positives])
    false_alarms = []
    missed = []
    other_kind = []
    incidents = 0
    for case, answer in zip(negatives + positives, answers, strict=True):
        name = f"{case['style']}/{case['id']}"
        kinds = [incident["kind"] for incident in answer["incidents"]]
        if "kind" not in case:
            incidents += bool(kinds)
            if answer["verdict"] == "oom":
                false_alarms.append(f"{name}: {', '.join(kinds)} ({case['why']})")
        elif answer["verdict"] != "oom":
            missed.append(
                f"{name}: {', '.join(kinds) or 'nothing'} instead of {case['kind']} ({case['why']})"
            )
        elif case["kind"] not in kinds and not case.get("any_kind"):
            other_kind.append(f"{name}: {', '.join(kinds)} instead of {case['kind']}")
    return Figures(
        len(negatives),
        tuple(false_alarms),
        incidents,
        len(positives),
        tuple(missed),
        tuple(other_kind),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="list every case answered wrongly"
    )
    verbose = parser.parse_args().verbose
    figures = measure()
    if verbose:
        for title in ("false_alarms", "missed", "other_kind"):
            for line in getattr(figures, title):
                print(f"  {title.replace('_', ' ')}: {line}")
    print(
        f"with incidents that are no oom: {figures.incidents}; failures of another kind: "
        f"{len(figures.other_kind)}"
    )
    conclude(
        f"look-alikes: {len(figures.false_alarms)} of {figures.negatives} give a false alarm, "
        f"{100 * figures.false_alarm_ratio:.1f} % (goal <= {100 * FALSE_ALARM_GOAL:.0f} %); real "
        "failures beside them: "
        f"{figures.positives - len(figures.missed)} of {figures.positives} found, "
        f"{100 * figures.recall_ratio:.1f} % (goal >= {100 * RECALL_GOAL:.0f} %)",
        met=figures.false_alarm_ratio <= FALSE_ALARM_GOAL and figures.recall_ratio >= RECALL_GOAL,
    )


if __name__ == "__main__":
    main()
