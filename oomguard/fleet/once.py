"""Each file is read once, however many paths lead to it: links, folders within folders, patterns that overlap."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from oomguard.fleet.inputs import Input, is_url


def read_once(inputs: Sequence[Input], *, keeps_named: bool) -> tuple[list[Input], int]:
    """Return the inputs, in their order, without those that lead to a file of another, and how many those are.

    Of several paths the one stays that tells most of who wrote the log, then one without a link in it, then the first.

    Args:
        inputs: all that were found.
        keeps_named: whether each path that the user named stays: there is one answer for each.
    """
    same: dict[object, list[Input]] = {}
    for one in inputs:
        if one.file is not None:
            same.setdefault(one.file, []).append(one)
    dropped = {id(one) for paths in same.values() if len(paths) > 1 for one in _repeated(paths, keeps_named)}
    return [one for one in inputs if id(one) not in dropped], len(dropped)


def _repeated(paths: Sequence[Input], keeps_named: bool) -> Iterable[Input]:
    named = [one for one in paths if one.is_named] if keeps_named else []
    kept = named or [min(paths, key=_rank)]  # min() takes the first of equals
    return (one for one in paths if not any(one is other for other in kept))


def _rank(one: Input) -> tuple[int, bool]:
    from oomguard.fleet.layouts import writer_of  # only where a file has several paths

    writer = writer_of(one.path)
    told = (writer.namespace, writer.pod, writer.container, writer.node, writer.job, writer.task, writer.rank)
    has_link = not is_url(one.path) and os.path.realpath(one.path) != os.path.abspath(one.path)  # noqa: PTH100 - .. stays
    return -sum(each is not None for each in told), has_link
