"""Figure: failures in new wordings, told by words weighed on other texts; two minutes. With --write the weights are fitted on all.

Each half of the threads is judged with weights of the other half, by the lexicon alone: no signature is asked, so every wording is
new to it. --texts adds sets of labelled texts that lie elsewhere (a folder means its .jsonl files); each set is then judged whole by
weights of all other texts, which tells what a set gathered next would meet. Needs ../shared beside the checkout.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from oomguard.rules.load import shipped_root
from support.figure import conclude
from support.labelled_texts import CORPORA, half_of, labelled_texts, texts_of
from support.weighing import Phrases, Weighed, Weights, weighed_texts

RECALL_GOAL, FALSE_ALARM_GOAL = 0.90, 0.02
LEAST_RATIO = 0.75
# A word that weighs less is left out of the file.
LEAST_WEIGHT = 0.02


def judged(phrases: Phrases, fold_of: Callable[[Weighed], object]) -> list[float]:
    """The certainty of every text, by weights of the texts of other folds."""
    folds = [fold_of(text) for text in phrases.texts]
    sure = [0.0] * len(folds)
    for fold in dict.fromkeys(folds):
        weights = phrases.fit([number for number, other in enumerate(folds) if other != fold])
        own = [number for number, other in enumerate(folds) if other == fold]
        for number, ratio in zip(own, phrases.certainties(weights, own), strict=True):
            sure[number] = ratio
    return sure


def write(weights: Weights) -> None:
    """Write the weights into the lexicon's files: beside the features that they weigh, and those of words a line each."""
    path = shipped_root() / "lexicon.toml"
    text = re.sub(r"(?m)^weight = .*\n", "", path.read_text(encoding="utf-8"))
    text = re.sub(r"(?m)^bias = .*$", f"bias = {weights.bias:.2f}", text)
    text = re.sub(r"(?m)^least_ratio = .*$", f"least_ratio = {LEAST_RATIO}", text)
    head, *features = text.split("[[feature]]\n")
    parts = [head]
    for feature, weight in zip(features, weights.features, strict=True):
        parts.append(re.sub(r"(?m)^(part = .*\n)", rf"\1weight = {weight:.2f}\n", feature, count=1))
    path.write_text("[[feature]]\n".join(parts), encoding="utf-8")
    kept = {word: weight for word, weight in weights.words.items() if abs(weight) >= LEAST_WEIGHT}
    words = "".join(f"{weight:.2f}\t{word}\n" for word, weight in sorted(kept.items()))
    path.with_name("lexicon_words.txt").write_text(words, encoding="utf-8")


def table(texts: list[Weighed], sure: list[float], verbose: bool) -> None:
    """Print what is found of every group, and how often each certainty was right."""
    for group in dict.fromkeys(text.group for text in texts):
        mine = [(text, ratio) for text, ratio in zip(texts, sure, strict=True) if text.group == group]
        right = sum(ratio >= LEAST_RATIO for text, ratio in mine if text.fails)
        false = sum(ratio >= LEAST_RATIO for text, ratio in mine if not text.fails)
        positives = sum(text.fails for text, _ in mine)
        print(f"{group:24} found {right:3} of {positives:3}   false alarms {false:3} of {len(mine) - positives:3}")
    if verbose:
        for text, ratio in zip(texts, sure, strict=True):
            if (ratio >= LEAST_RATIO) != text.fails:
                print(f"  {'missed' if text.fails else 'false'} {text.name} {ratio:.2f} {text.shown}")
    for low, high in ((0.5, 0.8), (0.8, 0.95), (0.95, 1.01)):
        inside = [text.fails for text, ratio in zip(texts, sure, strict=True) if low <= ratio < high]
        if inside:
            print(f"certainty {low}-{min(high, 1)}: right {sum(inside)} of {len(inside)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-v", "--verbose", action="store_true", help="list every text judged wrongly")
    parser.add_argument("--write", action="store_true", help="fit on all texts and write the weights")
    parser.add_argument("--texts", type=Path, nargs="+", default=[], help="more sets: a .jsonl file or a folder each")
    options = parser.parse_args()
    sets = [text for path in options.texts for text in texts_of(path)]
    phrases = Phrases(weighed_texts([*labelled_texts(), *sets]))
    public = {*CORPORA, *(text.group for text in sets)}
    texts = list(phrases.texts)
    if sets:
        how = "each set judged with the others' weights"
        sure = judged(phrases, lambda text: text.group if text.group in public else half_of(text.name))
    else:
        how = "each half judged with the other's weights"
        sure = judged(phrases, lambda text: half_of(text.name))
    table(texts, sure, options.verbose)
    mine = [(text.fails, ratio >= LEAST_RATIO) for text, ratio in zip(texts, sure, strict=True) if text.group in public]
    failures, others = [told for fails, told in mine if fails], [told for fails, told in mine if not fails]
    recall, false_ratio = sum(failures) / len(failures), sum(others) / len(others)
    if options.write:
        write(phrases.named(phrases.fit(range(len(texts)))))
    conclude(
        f"public threads, by the lexicon alone, {how}: {100 * recall:.1f} % of {len(failures)} "
        f"failures found (goal >= {100 * RECALL_GOAL:.0f} %), {100 * false_ratio:.1f} % of {len(others)} others taken for one "
        f"(goal <= {100 * FALSE_ALARM_GOAL:.0f} %)",
        met=recall >= RECALL_GOAL and false_ratio <= FALSE_ALARM_GOAL,
    )


if __name__ == "__main__":
    main()
