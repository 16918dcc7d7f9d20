"""Place the services of a stack on the GPUs of a machine: shares, order of starts, what fits.

Each service gets at least the smallest share of a GPU with which its start surely fits. The search
tries every GPU for the largest service first, then for the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from oomguard.core.errors import SettingError, UsageError
from oomguard.core.records import Record
from oomguard.core.settings import default_value
from oomguard.estimate import Fit
from oomguard.estimate.constants import others_margin_ratio
from oomguard.estimate.start.start import StartBudget
from oomguard.estimate.start.start_budget import budget_start
from oomguard.planning.start import StartRequest

_SHARE: Final = "gpu_memory_utilization"
_SHARE_STEPS: Final = 1000
_MOST_SERVICES: Final = 32
_MOST_TRIES: Final = 200_000


@dataclass(frozen=True, slots=True)
class StackGpu:
    """Describe one GPU of the machine; the name is None if unknown."""

    index: int
    total_bytes: int
    name: str | None = None


# Reads the start of a service on a GPU of a kind.
StartOn = Callable[[StackGpu], StartRequest]


@dataclass(frozen=True, slots=True)
class PlacedService:
    """Hold a service with its share, its budget, and its GPUs; none while it has no place.

    ``needed_bytes`` is what it takes of each GPU: its share, the CUDA context, graphs that the
    version does not count, and how much those may be larger.
    """

    name: str
    request: StartRequest
    budget: StartBudget
    needed_bytes: int
    gpus: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """Return on how many GPUs it runs."""
        settings = self.request.settings
        return settings.tensor_parallel_size * settings.pipeline_parallel_size


@dataclass(frozen=True, slots=True, repr=False)
class StackPlan(Record):
    """Report where the services of a stack go, in the order of their starts.

    Attributes:
        gpus: the GPUs of the machine.
        services: the placed services. Start one after another has finished.
        missing: each service without a place, with the reason.
        free_bytes: the memory of each GPU that no service takes, in the order of ``gpus``.
    """

    gpus: tuple[StackGpu, ...]
    services: tuple[PlacedService, ...]
    missing: Mapping[str, str]
    free_bytes: tuple[int, ...]

    @property
    def fit(self) -> Fit:
        """Return whether all services surely run together: ``yes``, ``no``, or ``unsure``."""
        if self.missing:
            return "no"
        if all(service.budget.fit == "yes" for service in self.services):
            return "yes"
        return "unsure"


# What a service needs on each kind of GPU of the machine: total bytes and name.
_Needs = dict[tuple[int, str | None], PlacedService]


def plan_stack(gpus: Sequence[StackGpu], services: Mapping[str, StartOn]) -> StackPlan:
    """Place services on GPUs.

    Raises:
        UsageError: there is no GPU or no service, or there are too many services.
    """
    if not gpus or not 0 < len(services) <= _MOST_SERVICES:
        raise UsageError(
            f"a stack needs a GPU and 1 to {_MOST_SERVICES} services, got {len(services)}",
            hint="list them in the file: gpus: [{name: RTX 4090, count: 2}]",
        )
    needs: list[_Needs] = []
    missing = {}
    for name, start_on in services.items():
        found: _Needs = {}
        for gpu in {(gpu.total_bytes, gpu.name): gpu for gpu in gpus}.values():
            need = _smallest(name, start_on(gpu))
            if isinstance(need, str):
                missing[name] = need
            else:
                found[gpu.total_bytes, gpu.name] = need
        # One kind of GPU is enough for a place, whatever the others lacked.
        if found:
            missing.pop(name, None)
            needs.append(found)
    # The search pops the last one: the largest service has the fewest places, so it goes first.
    needs.sort(key=lambda found: max(n.needed_bytes * n.ranks for n in found.values()))
    limits = tuple(round((1 - others_margin_ratio()) * gpu.total_bytes) for gpu in gpus)
    while (placed := _search(needs[::-1], gpus, limits)) is None:
        largest = next(iter(needs.pop().values()))
        missing[largest.name] = "no GPU has enough left for it next to the others"
    return _with_the_rest(placed, gpus, limits, missing)


def _smallest(name: str, request: StartRequest) -> PlacedService | str:
    """Return a service with the smallest share that surely fits, or the reason why none does.

    A share that the user set stays as it is.
    """

    # Neighbours take the rest of the GPU, so an unsure share is not enough here.
    def is_enough(budget: StartBudget) -> bool:
        return budget.spare_bytes >= budget.uncertainty_bytes

    low, high = 1, _SHARE_STEPS
    if _SHARE in request.given:
        low = high = round(request.settings.gpu_memory_utilization * _SHARE_STEPS)
    try:
        # If not even the largest share is enough, the search below would end with it unchecked.
        most = _budget(request, high / _SHARE_STEPS)
        if not is_enough(most):
            return "; ".join(most.reasons) or "more is uncertain than spare"
        while low < high:
            middle = (low + high) // 2
            if is_enough(_budget(request, middle / _SHARE_STEPS)):
                high = middle
            else:
                low = middle + 1
    except SettingError as error:
        return str(error)
    return _service(name, request, low / _SHARE_STEPS)


def _budget(request: StartRequest, share: float) -> StartBudget:
    settings = replace(request.settings, gpu_memory_utilization=share)
    return budget_start(request.model, settings)


def _service(name: str, request: StartRequest, share: float) -> PlacedService:
    budget = _budget(request, share)
    used = max(stage.used_bytes for stage in budget.stages)
    outside_bytes = max(0, used + budget.kept_back_bytes - budget.requested_bytes)
    needed = budget.requested_bytes + outside_bytes + budget.free_uncertain_bytes
    settings = replace(request.settings, gpu_memory_utilization=share)
    return PlacedService(name, replace(request, settings=settings), budget, needed)


def _search(
    needs: Sequence[_Needs], gpus: Sequence[StackGpu], limits: tuple[int, ...]
) -> list[PlacedService] | None:
    """Return the services with their GPUs, or None if no way to place all was found."""
    kinds = [(gpu.total_bytes, gpu.name) for gpu in gpus]
    tried: set[tuple[int, tuple[tuple[int, str], ...]]] = set()

    def place(number: int, left: tuple[int, ...]) -> list[PlacedService] | None:
        if number == len(needs):
            return []
        # GPUs of one kind with the same rest are interchangeable, so one order of them is enough.
        alike = tuple(sorted(zip(left, map(str, kinds), strict=True)))
        if (number, alike) in tried or len(tried) > _MOST_TRIES:
            return None
        tried.add((number, alike))
        for kind, need in needs[number].items():
            own = []
            for at, size in enumerate(left):
                if kinds[at] == kind and size >= need.needed_bytes:
                    own.append(at)
            # The tightest GPU that fits leaves the others whole for larger services.
            own.sort(key=lambda at: left[at])
            for chosen in itertools.combinations(own, need.ranks):
                after = (size - need.needed_bytes * (at in chosen) for at, size in enumerate(left))
                rest = place(number + 1, tuple(after))
                if rest is not None:
                    return [replace(need, gpus=chosen), *rest]
        return None

    return place(0, limits)


def _with_the_rest(
    placed: Sequence[PlacedService],
    gpus: Sequence[StackGpu],
    limits: Sequence[int],
    missing: Mapping[str, str],
) -> StackPlan:
    """Divide the rest of each GPU evenly among its services, up to vLLM's default share."""
    left = list(limits)
    guests = [0] * len(gpus)
    for service in placed:
        for at in service.gpus:
            left[at] -= service.needed_bytes
            guests[at] += _SHARE not in service.request.given
    services = []
    free = [gpu.total_bytes for gpu in gpus]
    for service in placed:
        request = service.request
        share = request.settings.gpu_memory_utilization
        if _SHARE not in request.given:
            more = min(left[at] // guests[at] for at in service.gpus)
            total = request.settings.gpu_total_bytes
            steps = (service.budget.requested_bytes + more) * _SHARE_STEPS // total
            most = float(default_value(_SHARE, "vllm", str(request.settings.version)) or 0.9)
            share = max(share, min(steps / _SHARE_STEPS, most))
        found = _service(service.name, request, share)
        indices = tuple(gpus[at].index for at in service.gpus)
        services.append(replace(found, gpus=indices))
        for at in service.gpus:
            free[at] -= found.needed_bytes
    return StackPlan(tuple(gpus), tuple(services), missing, tuple(free))
