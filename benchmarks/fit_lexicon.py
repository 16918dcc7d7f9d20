"""Figure: failures in new wordings, told by words weighed on other texts; a minute. With --write the weights are fitted on all.

Each half of the threads is judged with weights of the other half, by the lexicon alone: no signature is asked, so every wording is
new to it. Needs ../shared beside the checkout.
"""

import argparse
import re

from oomguard.rules.load import shipped_root
from support.figure import conclude
from support.labelled_texts import half_of, labelled_texts
from support.weighing import Weighed, certainty, fitted, weighed_texts

RECALL_GOAL, FALSE_ALARM_GOAL = 0.90, 0.02
# Of public threads; the other texts were written to be hard to tell.
THREADS = {"dev", "dev2", "lookalikes"}
LEAST_RATIO = 0.75


def judged_by_halves(texts: list[Weighed]) -> list[tuple[Weighed, float]]:
    """Every text with the certainty that weights of the other half give it."""
    out = []
    for half in (0, 1):
        weights = fitted([text for text in texts if half_of(text.name) != half])
        out += [(text, certainty(weights, text)) for text in texts if half_of(text.name) == half]
    return out


def write(weights: list[float]) -> None:
    """Write the weights into the lexicon's file, beside the features that they weigh."""
    path = shipped_root() / "lexicon.toml"
    text = re.sub(r"(?m)^weight = .*\n", "", path.read_text(encoding="utf-8"))
    text = re.sub(r"(?m)^bias = .*$", f"bias = {weights[0]:.2f}", text)
    text = re.sub(r"(?m)^least_ratio = .*$", f"least_ratio = {LEAST_RATIO}", text)
    head, *features = text.split("[[feature]]\n")
    parts = [head]
    for feature, weight in zip(features, weights[1:], strict=True):
        parts.append(re.sub(r"(?m)^(part = .*\n)", rf"\1weight = {weight:.2f}\n", feature, count=1))
    path.write_text("[[feature]]\n".join(parts), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-v", "--verbose", action="store_true", help="list every text judged wrongly")
    parser.add_argument("--write", action="store_true", help="fit on all texts and write the weights")
    options = parser.parse_args()
    texts = weighed_texts(labelled_texts())
    judged = judged_by_halves(texts)
    for group in dict.fromkeys(text.group for text in texts):
        mine = [(text, sure) for text, sure in judged if text.group == group]
        right = sum(sure >= LEAST_RATIO for text, sure in mine if text.fails)
        false = sum(sure >= LEAST_RATIO for text, sure in mine if not text.fails)
        positives = sum(text.fails for text, _ in mine)
        print(f"{group:24} found {right:3} of {positives:3}   false alarms {false:3} of {len(mine) - positives:3}")
    if options.verbose:
        for text, sure in judged:
            if (sure >= LEAST_RATIO) != text.fails:
                print(f"  {'missed' if text.fails else 'false'} {text.name} {sure:.2f} {text.shown}")
    for low, high in ((0.5, 0.8), (0.8, 0.95), (0.95, 1.01)):
        inside = [text.fails for text, sure in judged if low <= sure < high]
        if inside:
            print(f"certainty {low}-{min(high, 1)}: right {sum(inside)} of {len(inside)}")
    failures = [sure for text, sure in judged if text.fails and text.group in THREADS]
    others = [sure for text, sure in judged if not text.fails and text.group in THREADS]
    recall = sum(sure >= LEAST_RATIO for sure in failures) / len(failures)
    false_ratio = sum(sure >= LEAST_RATIO for sure in others) / len(others)
    if options.write:
        write(fitted(texts))
    conclude(
        f"public threads, by the lexicon alone, each half judged with the other's weights: {100 * recall:.1f} % of {len(failures)} "
        f"failures found (goal >= {100 * RECALL_GOAL:.0f} %), {100 * false_ratio:.1f} % of {len(others)} others taken for one "
        f"(goal <= {100 * FALSE_ALARM_GOAL:.0f} %)",
        met=recall >= RECALL_GOAL and false_ratio <= FALSE_ALARM_GOAL,
    )


if __name__ == "__main__":
    main()
