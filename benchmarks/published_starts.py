"""Figure: error of the predicted activation peak on starts that strangers published: other versions and models than the fit's.

Each row holds what a start of vLLM printed, the settings that it was made with, and which of them are the version's defaults
because nothing else was said. Rows that a constant was taken from are printed, and left out of the means. Two rules were mended
when the rows were first read: before 0.17 the constant is of the whole peak, so no base stands beside it (its source says so), and
before 0.12 the experts' workspace is not kept beside the sampler. With the rules as they stood the mean was 4.9 %, the worst +14.2 %.
"""

import json
from pathlib import Path

from packaging.version import Version

from oomguard.facts import GIB
from oomguard.memory.model.shape import read_shape
from oomguard.memory.vllm.activations import peak_activation
from support.figure import conclude

STARTS = Path(__file__).parent / "data" / "published_starts.json"


def predicted_gib(start: dict) -> float:
    """The peak of one rank by the start's configuration, version and settings only."""
    settings = start["settings"]
    peak = peak_activation(
        read_shape(start["config"]),
        Version(start["version"]),
        rows=settings["max_num_seqs"],
        step_tokens=settings["max_num_batched_tokens"],
        tensor_parallel_size=settings.get("tensor_parallel_size", 1),
    )
    return peak.bytes / GIB


def main() -> None:
    errors = []
    for start in json.loads(STARTS.read_text())["starts"]:
        mine, theirs = predicted_gib(start), start["printed_gib"]["peak_activation"]
        error = 100 * (mine / theirs - 1)
        used = start.get("used_for")
        row = f"{start['model']:31} vLLM {start['version']:6} {mine:5.2f} / {theirs:5.2f} GiB {error:+6.1f} %"
        print(row + (f"  (used for {used})" if used else ""))
        if not used:
            errors.append(error)
    mean, worst = sum(map(abs, errors)) / len(errors), max(errors, key=abs)
    conclude(
        f"peak activation, published starts: mean {mean:.1f} %, worst {worst:+.1f} %, n = {len(errors)} (goal <= 5 %)",
        met=mean <= 5,
    )


if __name__ == "__main__":
    main()
