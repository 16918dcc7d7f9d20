"""Figure: `oomguard plan stack.yaml` on random sets of services and simulated GPUs.

A simulated GPU starts the services in the planned order by vLLM's own rules: what a service asks
for must be free beside the others, and its cache must hold one request. Its true parts lie anywhere
in the range that the plan states. A set is feasible if some way to place it works with true parts
and no margin at all.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from packaging.version import Version

from oomguard.core.facts import GIB
from oomguard.estimate.constants import gpu_total_bytes
from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.start.start import StartBudget, VllmSettings
from oomguard.estimate.start.start_budget import budget_start
from oomguard.planning.stack import StackGpu, StackPlan, plan_stack
from oomguard.planning.start import StartRequest
from support.figure import conclude

SETS = 200
SIZES = {
    "0.5B": (24, 896, 4864, 14, 2, 151936),
    "1B": (16, 2048, 8192, 32, 8, 128256),
    "3B": (36, 2048, 11008, 16, 2, 151936),
    "8B": (32, 4096, 14336, 32, 8, 128256),
    "14B": (48, 5120, 13824, 40, 8, 152064),
}
CARDS = ("RTX 4090", "L40S", "A100", "H100")
LENGTHS = (2048, 4096, 8192, 16384, 32768)
VERSIONS = ("0.11.0", "0.19.1", "0.26.0", "0.31.0")
GOAL_FOUND = 0.95


@dataclass(frozen=True)
class Truth:
    """What a service really takes, beside what its plan says: bytes of each GPU."""

    pool_error: float
    context_bytes: int


def models() -> dict[str, Any]:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    names = (*names, "num_key_value_heads", "vocab_size")
    found = {}
    for name, numbers in SIZES.items():
        config = dict(zip(names, numbers, strict=True))
        config |= {"model_type": "qwen2", "torch_dtype": "bfloat16"}
        config |= {"max_position_embeddings": 32768, "architectures": ["Qwen2ForCausalLM"]}
        found[name] = read_model(ModelFiles(name, "config.json", config, None))
    return found


def random_set(chance: random.Random, known: dict[str, Any]) -> tuple[list[StackGpu], dict]:
    card = chance.choice(CARDS)
    total = gpu_total_bytes(card)
    gpus = [StackGpu(number, total, card) for number in range(chance.randint(1, 4))]
    version = Version(chance.choice(VERSIONS))
    services = {}
    for number in range(chance.randint(2, 6)):
        size = chance.choice(list(known))
        settings = VllmSettings(version, total, 0.9, gpu_name=card)
        settings = replace(
            settings,
            max_model_len=chance.choice(LENGTHS),
            max_num_seqs=chance.choice((16, 64, 256)),
            tensor_parallel_size=chance.choice((1, 1, 1, 2)),
        )
        request = StartRequest(size, known[size], settings, frozenset())
        services[f"service{number}"] = lambda gpu, request=request: request
    return gpus, services


def truth_of(chance: random.Random, budget: StartBudget) -> Truth:
    error = chance.uniform(-budget.uncertainty_above_bytes, budget.uncertainty_bytes)
    around = budget.free_uncertain_bytes
    return Truth(error, budget.not_free_bytes + round(chance.uniform(-around, around)))


def failures(stack: StackPlan, truths: dict[str, Truth]) -> Iterator[str]:
    """Yield each start of a stack that fails on the simulated GPUs."""
    left = {gpu.index: gpu.total_bytes for gpu in stack.gpus}
    for service in stack.services:
        budget = service.budget
        truth = truths[service.name]
        needed = max(stage.needed_bytes for stage in budget.stages)
        if budget.kv_cache_pool_bytes - truth.pool_error < needed:
            yield f"{service.name} has no room for a request"
        for gpu in service.gpus:
            if left[gpu] - truth.context_bytes < budget.requested_bytes:
                yield f"{service.name} asks for more than is free"
            left[gpu] -= budget.requested_bytes + truth.context_bytes + uncounted(budget)
            if left[gpu] < 0:
                yield f"{service.name} takes more than GPU {gpu} has"


def uncounted(budget: StartBudget) -> int:
    """The bytes of graphs and later samples that come on top of the share."""
    used = max(stage.used_bytes for stage in budget.stages)
    beside = used + budget.kept_back_bytes - budget.requested_bytes - budget.not_free_bytes
    return max(0, beside)


def is_feasible(
    gpus: list[StackGpu], services: dict, chance: random.Random
) -> tuple[bool, dict[str, Truth]]:
    """Whether the services can be placed with their true sizes, by trying every way."""
    sizes = []
    truths = {}
    for name, start_on in services.items():
        request = start_on(gpus[0])
        budget = budget_start(request.model, request.settings)
        truths[name] = truth = truth_of(chance, budget)
        needed = max(stage.needed_bytes for stage in budget.stages)
        own = budget.requested_bytes - budget.kv_cache_pool_bytes + truth.pool_error + needed
        ranks = request.settings.tensor_parallel_size
        sizes.append((own + truth.context_bytes + uncounted(budget), ranks))
    sizes.sort(reverse=True)

    def place(number: int, left: tuple[float, ...]) -> bool:
        if number == len(sizes):
            return True
        size, ranks = sizes[number]
        fitting = [at for at, free in enumerate(left) if free >= size]
        if ranks == 1:
            choices = [(at,) for at in fitting]
        else:
            choices = [(a, b) for a in fitting for b in fitting if a < b]
        return any(
            place(number + 1, tuple(f - size * (at in chosen) for at, f in enumerate(left)))
            for chosen in choices
        )

    return place(0, tuple(float(gpu.total_bytes) for gpu in gpus)), truths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=43)
    parser.add_argument("-v", "--verbose", action="store_true", help="print each missed set")
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    known = models()
    planned = feasible = found = 0
    failed = []
    for number in range(SETS):
        gpus, services = random_set(chance, known)
        possible, truths = is_feasible(gpus, services, chance)
        stack = plan_stack(gpus, services)
        feasible += possible
        if stack.fit == "yes":
            planned += 1
            failed += [f"set {number}: {why}" for why in failures(stack, truths)]
            found += possible
        elif possible and asked.verbose:
            short = dict(stack.missing)
            print(f"set {number}: {len(gpus)} of {gpus[0].total_bytes / GIB:.0f} GiB: {short}")
    share = found / max(1, feasible)
    for line in failed:
        print(line)
    conclude(
        f"{SETS} sets: {planned} planned to fit, {len(failed)} starts of those fail (goal 0); "
        f"{feasible} feasible, {found} of them found, {100 * share:.1f} % "
        f"(goal {100 * GOAL_FOUND:.0f})",
        met=not failed and share >= GOAL_FOUND,
    )


if __name__ == "__main__":
    main()
