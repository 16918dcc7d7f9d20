"""The devices of this machine as a person asks for them: who holds what, who has a lease, and what
is hidden from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from oomguard.cluster.placement.devices import Limit, Place, limited, places_of
from oomguard.cluster.placement.leases import Lease, LeaseFolder
from oomguard.core.errors import UsageError
from oomguard.core.facts import format_gib
from oomguard.probe.nvml import Gpu, Survey, survey
from oomguard.probe.processes import sees_the_host_s_pids


@dataclass(frozen=True, slots=True)
class SeenPlace:
    """One place: who has its lease, and whether CUDA_VISIBLE_DEVICES leaves it."""

    place: Place
    lease: Lease | None
    is_visible: bool

    @property
    def unseen_bytes(self) -> int | None:
        """What is held by nobody that is seen, None where it cannot be told."""
        own = self.place
        if own.used_bytes_by_pid is None:
            sizes = None
        else:
            sizes = own.used_bytes_by_pid.values()
        if own.total_bytes is None or own.free_bytes is None or sizes is None or None in sizes:
            return None
        return max(0, own.total_bytes - own.free_bytes - sum(size or 0 for size in sizes))


@dataclass(frozen=True, slots=True)
class Overview:
    """All of it.

    Attributes:
        survey: what NVML tells.
        places: the GPUs and instances, in the order of the bus.
        folder: where leases lie, and why none can be held.
        pids_are_known: whether the numbers of processes are those of this machine's processes as
            they are seen from here.
        hidden: what is hidden from here, a line each.
    """

    survey: Survey
    places: tuple[SeenPlace, ...]
    folder: LeaseFolder
    pids_are_known: bool
    hidden: tuple[str, ...]

    def gpu(self, place: Place) -> Gpu:
        """Return the GPU of a place."""
        return next(gpu for gpu in self.survey.gpus if gpu.device.index == place.index)


def look(folder: LeaseFolder, environ: Mapping[str, str]) -> Overview:
    """Look at the devices of this machine; nothing is locked or changed."""
    found = survey()
    known = sees_the_host_s_pids() is True
    places = places_of(found)
    try:
        limit = limited(places, environ)
        wrong = None
    except UsageError as error:
        limit = Limit(places)
        wrong = f"{error}; {error.hint}"
    leases = folder.holders(place.key for place in places)
    seen = tuple(SeenPlace(place, leases.get(place.key), place in limit.places) for place in places)
    told = (limit.hides, wrong, *_hidden(found, seen, pids_are_known=known))
    return Overview(found, seen, folder, known, tuple(text for text in told if text))


def _hidden(found: Survey, seen: tuple[SeenPlace, ...], *, pids_are_known: bool) -> Iterator[str]:
    if found.failure is not None:
        if found.driver:
            driver = f", driver {found.driver}"
        else:
            driver = ""
        yield f"NVML does not answer: {found.failure}{driver}: which devices there are is not known"
        return
    for one in seen:
        if one.place.used_bytes_by_pid is None and one.place.cannot is None:
            yield (
                f"{one.place.shown}: the driver does not tell which processes use it (an old "
                "driver, MIG, or no permission)"
            )
        if one.unseen_bytes and not one.place.is_empty and not one.place.used_bytes_by_pid:
            yield (
                f"{one.place.shown}: {format_gib(one.unseen_bytes)} is held by processes that are "
                "not seen from here"
            )
    if not pids_are_known and any(one.place.used_bytes_by_pid for one in seen):
        yield (
            "the numbers of processes are those of the host: inside this container they name "
            "others, or nobody"
        )
