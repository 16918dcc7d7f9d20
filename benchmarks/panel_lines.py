"""Figure: how soon a panel shows what to do, and how long it is, on the labelled development sets.

Each failure's panel is written at 80 columns. Counted are the lines until the command to paste (or
the first action's own line if nothing can be pasted), the lines of the whole panel, and the panels
with an empty slot, such as "unknown was requested". Needs ../shared beside the checkout.
"""

import argparse
import io
import json
import re
import statistics

from rich.console import Console

from oomguard.core.incident import Diagnosis, Incident
from oomguard.diagnosis import diagnose
from oomguard.report.panel import print_diagnosis
from support.commands import ROOT
from support.figure import conclude, skip

SETS = [ROOT.parent / "shared" / "corpus" / name for name in ("dev.jsonl", "dev2.jsonl")]
COLUMNS = 80
GOAL_COMMAND, GOAL_MEDIAN, GOAL_MOST = 5, 22, 24
EMPTY = re.compile(
    r"\bunknown (?:was|were|is|are|of|bytes|GiB)\b|\bNone\b|\bnan\b|(?<!\w)\(\s*\)|(?<!\w)\[\s*\]|, ,|\{\w+"
)


def panel_of(incident: Incident) -> list[str]:
    """Return the lines of one failure's panel."""
    file = io.StringIO()
    console = Console(file=file, width=COLUMNS, no_color=True, highlight=False)
    print_diagnosis(console, Diagnosis("error.log", (incident,)))
    return file.getvalue().splitlines()


def line_of_command(lines: list[str], incident: Incident) -> int:
    """Return the line, from 1, of what to do first."""
    first = next(number for number, line in enumerate(lines, 1) if line.startswith("Do this: "))
    command = incident.actions[0].command
    if command is None:
        return first
    shown = command.split("\n")[0]
    return next(number for number, line in enumerate(lines, 1) if shown in line)


def has_empty_slot(lines: list[str]) -> bool:
    """Return whether a line of oomguard's own text has a slot without a value."""
    own = [line for line in lines if " | " not in line]
    return any(EMPTY.search(line) for line in own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-v", "--verbose", action="store_true", help="print the panels that miss")
    options = parser.parse_args()
    if not all(path.is_file() for path in SETS):
        skip("the labelled texts are not here")
    commands: list[int] = []
    lengths: list[int] = []
    empty = 0
    for path in SETS:
        for row in map(json.loads, path.read_text().splitlines()):
            for incident in diagnose(row["text"]).incidents:
                if not incident.actions:
                    continue
                lines = panel_of(incident)
                at = line_of_command(lines, incident)
                commands.append(at)
                lengths.append(len(lines))
                is_empty = has_empty_slot(lines)
                empty += is_empty
                misses = at > GOAL_COMMAND or len(lines) > GOAL_MOST or is_empty
                if options.verbose and misses:
                    print("\n".join([f"--- {row['id']}: line {at}, {len(lines)} lines", *lines]))
    conclude(
        f"{len(lengths)} panels: the command is in line {statistics.median(commands):.0f} (median), "
        f"{max(commands)} at most (goal <= {GOAL_COMMAND}); {statistics.median(lengths):.0f} lines "
        f"(median, goal <= {GOAL_MEDIAN}), {max(lengths)} at most (goal <= {GOAL_MOST}); with an "
        f"empty slot {empty} (goal 0)",
        met=max(commands) <= GOAL_COMMAND
        and statistics.median(lengths) <= GOAL_MEDIAN
        and max(lengths) <= GOAL_MOST
        and not empty,
    )


if __name__ == "__main__":
    main()
