"""Inputs over a Ray cluster: the same results as here, in the same order; what a node cannot read as it lies here is read here."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from oomguard._version import __version__
from oomguard.cli.rendering import InputRenderer, RenderedInput, Work
from oomguard.errors import UsageError
from oomguard.fleet.inputs import Input, is_url
from oomguard.observe.source import shown

# A batch is so many bytes of logs, or fewer: each CPU gets several of them, so that the last ones end together.
BATCH_BYTES: Final = 24 << 20
BATCH_INPUTS: Final = 128
_BATCHES_PER_CPU: Final = 8


@dataclass(frozen=True, slots=True)
class _Common:
    """What all batches share: the work, the folder that relative paths begin in, and the version that reads them."""

    work: Work
    folder: str
    version: str


def on_cluster(
    work: Work,
    inputs: Sequence[Input],
    jobs: int,
    own: Callable[[str], RenderedInput],
    on_read: Callable[[int], None] | None,
) -> Generator[RenderedInput]:
    """Yield the outcome of every input, in their order.

    Args:
        work: what is asked for.
        inputs: the inputs.
        jobs: how many batches are worked on at the same time; 0: as many as the cluster has CPUs.
        own: reads what only this process can read, such as standard input.
        on_read: called with the bytes of each batch that is done.

    Raises:
        UsageError: the cluster cannot be joined, or its workers have no oomguard of this version.
    """
    from oomguard.engines.ray.cluster import cluster, cpus
    from oomguard.engines.ray.ordered import in_order

    with cluster() as ray:
        at_once = jobs or cpus(ray)
        away = [one for one in inputs if one.size_bytes is not None]
        batches = _batches(away, at_once)
        common = _Common(replace(work, in_folders=frozenset()), _folder(), __version__)
        try:
            results = in_order(ray, read_batch, common, batches, at_once)
            with contextlib.closing(_singly(results, batches, own, on_read)) as outcomes:
                for one in inputs:
                    yield own(one.path) if one.size_bytes is None else next(outcomes)
        except ImportError as error:
            raise UsageError(
                f"the cluster's workers have no oomguard: {error}",
                hint=f"install oomguard {__version__} on every node, from the same wheel file or clone",
            ) from None


def read_batch(common: _Common, batch: Sequence[Input]) -> list[RenderedInput | None]:
    """Diagnose the inputs of a batch, on a worker; None for one that does not lie on this node as it does where it was listed.

    Raises UsageError where this is another version of oomguard.
    """
    if common.version != __version__:
        raise UsageError(
            f"the cluster's workers have oomguard {__version__}, this process has {common.version}",
            hint=f"install oomguard {common.version} on every node, from the same wheel file or clone",
        )
    with contextlib.suppress(OSError):  # where there is no such folder no relative path is found either
        os.chdir(common.folder)
    renderer = _renderer(common.work)
    return [renderer.diagnose(one.path, is_named=one.is_named) if _is_the_same(one) else None for one in batch]


@functools.lru_cache(maxsize=1)
def _renderer(work: Work) -> InputRenderer:
    return InputRenderer(work)


def _is_the_same(one: Input) -> bool:
    if is_url(one.path):
        return True
    try:
        about = Path(one.path).stat()
    except OSError:
        return False
    return about.st_size == one.size_bytes and about.st_mtime == one.modified_at


def _folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed: no relative path can be read here either
        return "/"


def _batches(inputs: Sequence[Input], at_once: int) -> list[list[Input]]:
    total = sum(one.size_bytes or 0 for one in inputs)
    most_bytes = min(BATCH_BYTES, max(1, total // (_BATCHES_PER_CPU * at_once)))
    most = min(BATCH_INPUTS, max(1, len(inputs) // (_BATCHES_PER_CPU * at_once)))
    batches: list[list[Input]] = []
    size_bytes = 0
    for one in inputs:
        if not batches or len(batches[-1]) >= most or size_bytes + (one.size_bytes or 0) > most_bytes:
            batches.append([])
            size_bytes = 0
        batches[-1].append(one)
        size_bytes += one.size_bytes or 0
    return batches


def _singly(
    results: Generator[list[RenderedInput | str | None]],
    batches: Sequence[Sequence[Input]],
    own: Callable[[str], RenderedInput],
    on_read: Callable[[int], None] | None,
) -> Generator[RenderedInput]:
    with contextlib.closing(results):
        for batch, outcomes in zip(batches, results, strict=True):
            if on_read is not None:
                on_read(sum(one.size_bytes or 0 for one in batch))
            for one, outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, str):
                    yield RenderedInput(error=f"{shown(one.path)}: {outcome}")
                elif outcome is None or (outcome.error and not outcome.text and not outcome.findings):
                    yield own(
                        one.path
                    )  # whatever stood in the way there: here it is read, or told, as without a cluster
                else:
                    yield outcome
