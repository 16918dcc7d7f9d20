"""Figure: what ``oomguard plan`` costs beside ``python -c pass``, with transformers and without,
and a sweep beside one plan.

The model is an 8B by its config.json alone, and once more as a family that only transformers can
build: the first plan of it builds, later ones read the answer from the cache. Without transformers: its folder and torch's are out of
sight, all else is as it was.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import oomguard
from support.commands import seconds
from support.figure import conclude

ROUNDS = 10
GOAL_MORE_S = 0.4
GOAL_SWEEP_RATIO = 2
GOAL_BUILT_S = 1.5
HIDDEN = ("torch", "transformers")
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
BUILT = {**MODEL, "architectures": ["StableLmForCausalLM"], "model_type": "stablelm"}
PLAN = ["plan", "--device", "cuda", "--gpu-name", "H100", "--no-calibration", "--format", "json"]
SWEEP = ["--sweep", "max_model_len=" + ",".join(str(1024 * n) for n in range(1, 21))]


def without_transformers(folder: Path) -> list[str]:
    """A Python that sees all installed packages but those; their files are linked into
    ``folder``.
    """
    for place in map(Path, sys.path):
        if place.name != "site-packages":
            continue
        for entry in place.iterdir():
            if (
                entry.name.split("-")[0].split(".")[0] not in HIDDEN
                and not (folder / entry.name).exists()
            ):
                (folder / entry.name).symlink_to(entry)
    paths = [str(Path(oomguard.__file__).parents[1]), str(folder)]
    start = f"import sys; sys.path[:0] = {paths!r}; from oomguard.__main__ import main; main()"
    return [sys.executable, "-I", "-S", "-c", start]


def measured(commands: dict[str, list[str]]) -> dict[str, float]:
    for command in commands.values():
        seconds(command)  # warm
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            times[name].append(seconds(command))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        bare = Path(folder, "packages")
        model.mkdir()
        bare.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        os.environ["XDG_CACHE_HOME"] = folder
        plan = [sys.executable, "-m", "oomguard", *PLAN, str(model)]
        other = Path(folder, "other")
        other.mkdir()
        (other / "config.json").write_text(json.dumps(BUILT))
        build = [*plan[:-1], str(other)]
        first_s = seconds(build)
        found = measured(
            {
                "nothing": [sys.executable, "-c", "pass"],
                "with": plan,
                "without": [*without_transformers(bare), *PLAN, str(model)],
                "sweep": [*plan, *SWEEP],
                "built": build,
            }
        )
    more = {name: found[name] - found["nothing"] for name in ("with", "without")}
    ratio = found["sweep"] / found["with"]
    conclude(
        f"plan of an 8B: {more['with']:.2f} s more than python -c pass with transformers, "
        f"{more['without']:.2f} s without "
        f"(goal <= {GOAL_MORE_S}); 20 rows of a sweep {ratio:.2f} times one plan (goal <= "
        f"{GOAL_SWEEP_RATIO}); a family that transformers builds {first_s:.1f} s once, then "
        f"{found['built']:.2f} s (goal <= {GOAL_BUILT_S}); "
        f"{time.perf_counter() - began:.0f} s",
        met=max(more.values()) <= GOAL_MORE_S
        and ratio <= GOAL_SWEEP_RATIO
        and found["built"] <= GOAL_BUILT_S,
    )


if __name__ == "__main__":
    main()
