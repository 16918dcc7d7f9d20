"""All inputs of a command, read by whoever pays: this process, several here, or a cluster; their outcomes in the order of the inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence

from oomguard.cli.progress import ReadingProgress
from oomguard.cli.rendering import InputRenderer, OnePage, RenderedInput, Work
from oomguard.errors import InputError
from oomguard.fleet.inputs import Input


def read_all(
    inputs: Sequence[Input], work: Work, jobs: int, on: str, write: Callable[[str], None], errors: list[InputError]
) -> bool:
    """Diagnose every input and write what comes out, in their order; return whether an out-of-memory was found.

    Args:
        inputs: the inputs.
        work: what is asked for.
        jobs: how many processes read; 0: as many as pay.
        on: ``local``, or ``ray`` for a cluster.
        write: receives each text.
        errors: an error for each input that cannot be read is added.
    """
    page, found = OnePage(), False
    with reading(inputs, work, jobs, on, write) as (outcomes, finish):
        for outcome in outcomes:
            finish(page.add(outcome.text) if work.form == "html" and outcome.text else outcome.text)
            found = found or outcome.found
            if outcome.error:
                errors.append(InputError(outcome.error, hint=outcome.hint))
    write(page.end())
    return found


@contextlib.contextmanager
def reading(
    inputs: Sequence[Input], work: Work, jobs: int, on: str, write: Callable[[str], None]
) -> Iterator[tuple[Iterator[RenderedInput], Callable[[str], None]]]:
    """Yield the outcomes of all inputs, and what takes the text of each once it is done; the arguments are those of ``read_all``."""
    renderer, names = InputRenderer(work), [one.path for one in inputs]
    sizes = {one.path: one.size_bytes for one in inputs if one.size_bytes is not None}
    with ReadingProgress(len(inputs), sum(sizes.get(name, 0) for name in names), write) as progress:
        on_read = progress.read if progress.shown else None

        def own(path: str) -> RenderedInput:
            return renderer.diagnose(path, on_read)

        outcomes: Generator[RenderedInput]
        if on == "ray":
            from oomguard.cli.cluster import on_cluster

            outcomes = on_cluster(work, inputs, jobs, own, on_read)
        elif len(inputs) > 1:
            from oomguard.cli.workers import automatic_jobs, in_parallel

            jobs = min(jobs or automatic_jobs(sizes), len(inputs))
            outcomes = in_parallel(work, names, jobs, own, on_read) if jobs > 1 else (own(name) for name in names)
        else:
            outcomes = (own(name) for name in names)
        with contextlib.closing(outcomes):
            yield outcomes, progress.finish
