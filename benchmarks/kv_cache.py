"""KV cache tokens, blocks and concurrency of `oomguard plan` beside the real vLLM for the CPU, over many architectures.

Each model has the true head shapes of its family and a few layers, enough for its pattern of layers. Needs scripts/vllm-env.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from oomguard.memory.model_files import ModelFiles
from oomguard.memory.plan import plan_vllm
from oomguard.memory.prepared import prepare
from oomguard.memory_plan import MemoryPlan, VllmSettings

ROOT = Path(__file__).parents[1]
MODELS = Path(__file__).with_name("kv_models.json")
ENGINE_VERSION = Version("0.32.0")


def engine_answers(names: list[str]) -> Iterator[dict]:
    """What the real engine says of each model."""
    binaries = ROOT / ".venv-vllm" / "bin"
    if not (binaries / "python").exists():
        raise SystemExit("no vLLM environment: run scripts/vllm-env")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OOMGUARD_", "VLLM_"))}
    command = [str(binaries / "python"), str(MODELS.with_name("kv_engine.py")), str(MODELS), *names]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        yield from (json.loads(line) for line in child.stdout or ())


def ours(config: dict, answer: dict) -> MemoryPlan:
    """The closed form under the settings that the engine was started with."""
    settings = VllmSettings(
        version=ENGINE_VERSION, gpu_total_bytes=1 << 40, gpu_memory_utilization=0.9, device="cpu",
        kv_cache_memory_bytes=answer["pool_bytes"], max_model_len=answer["max_model_len"], max_num_seqs=answer["max_num_seqs"],
        max_num_batched_tokens=answer["max_num_batched_tokens"], enforce_eager=True,
    )  # fmt: skip
    return plan_vllm(prepare(ModelFiles("model", "config.json", config, ())), settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these models of kv_models.json")
    models = json.loads(MODELS.read_text())
    equal, seen = 0, 0
    for answer in engine_answers(parser.parse_args().names):
        if "error" in answer:
            print(f"{answer['name']:20} the engine does not start it: {answer['error']}")
            continue
        plan = ours(models[answer["name"]], answer)
        mine = (plan.kv_cache_blocks, plan.kv_cache_tokens, round(plan.max_concurrency, 6))
        theirs = (answer["blocks"], answer["tokens"], round(answer["max_concurrency"], 6))
        seen, equal = seen + 1, equal + (mine == theirs)
        print(
            f"{answer['name']:20} {'equal' if mine == theirs else 'NOT EQUAL'}  blocks, tokens, at once: {mine} and vLLM's {theirs}"
        )
    print(f"{equal} of {seen} architectures equal to the block (goal: all of 20 or more)")


if __name__ == "__main__":
    main()
