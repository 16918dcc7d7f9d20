"""Figure: architectures whose KV blocks, tokens and requests at once `oomguard plan` tells as the
real vLLM for the CPU does.

Each model has the true head shapes of its family and a few layers, enough for its pattern of
layers. Needs scripts/vllm-env.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.start.start import StartBudget, VllmSettings
from oomguard.estimate.start.start_budget import budget_start
from support.commands import ROOT
from support.figure import conclude, skip
from support.resume import Results

HERE = Path(__file__).parent
MODELS = HERE / "data" / "kv_models.json"
ENGINE_VERSION = Version("0.32.0")
GOAL = 20


def engine_answers(names: list[str]) -> Iterator[dict]:
    """What the real engine says of each model."""
    binaries = ROOT / ".venv-vllm" / "bin"
    if not (binaries / "python").exists():
        skip("no vLLM environment: run scripts/vllm-env")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OOMGUARD_", "VLLM_"))
    }
    command = [
        str(binaries / "python"),
        str(HERE / "support" / "kv_engine.py"),
        str(MODELS),
        *names,
    ]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        yield from (json.loads(line) for line in child.stdout or ())


def ours(config: dict, answer: dict) -> StartBudget:
    """The closed form under the settings that the engine was started with."""
    settings = VllmSettings(
        version=ENGINE_VERSION,
        gpu_total_bytes=1 << 40,
        gpu_memory_utilization=0.9,
        device="cpu",
        kv_cache_memory_bytes=answer["pool_bytes"],
        max_model_len=answer["max_model_len"],
        max_num_seqs=answer["max_num_seqs"],
        max_num_batched_tokens=answer["max_num_batched_tokens"],
        enforce_eager=True,
    )
    return budget_start(
        read_model(ModelFiles("model", "config.json", config, ()), dtype=config["torch_dtype"]),
        settings,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these models of kv_models.json")
    parser.add_argument(
        "--resume",
        type=Path,
        help="a file that keeps each model's answer; models in it are not started again",
    )
    asked = parser.parse_args()
    models = json.loads(MODELS.read_text())
    known = Results(asked.resume)
    names = asked.names or list(models)
    equal = 0
    seen = 0
    refused = 0
    for answer in all_answers(names, known):
        if "error" in answer:
            refused += 1
            print(f"{answer['name']:20} the engine does not start it: {answer['error']}")
            continue
        plan = ours(models[answer["name"]], answer)
        mine = (plan.kv_cache_blocks, plan.kv_cache_tokens, round(plan.max_concurrency, 6))
        theirs = (answer["blocks"], answer["tokens"], round(answer["max_concurrency"], 6))
        seen = seen + 1
        equal = equal + (mine == theirs)
        print(
            f"{answer['name']:20} {'equal' if mine == theirs else 'NOT EQUAL'}  blocks, tokens, at "
            f"once: {mine} and vLLM's {theirs}"
        )
    conclude(
        f"{equal} of {seen} architectures equal to the block, {refused} not started (goal: all of "
        f"{GOAL} or more)",
        met=equal == seen and seen + refused == len(names) and (seen >= GOAL or bool(asked.names)),
    )


def all_answers(names: list[str], known: Results) -> Iterator[dict]:
    """The answers that are kept, then those of engines started now."""
    left = [name for name in names if known.get(name) is None]
    yield from (known.get(name) for name in names if name not in left)
    for answer in engine_answers(left) if left else ():
        if "error" not in answer:
            known.add(answer["name"], answer)
        yield answer


if __name__ == "__main__":
    main()
