"""A result that has no room on its device at once: its rows wait on the host, and what is computed of them is computed in parts.

Most programs keep little of a large result: the last token's logits, a mean over tokens. This imports torch, so only code that
has it already may import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from oomguard.guarding.row_operations import bound, cut_arguments, is_copy, is_view, name_of, written
from oomguard.log import get_logger
from oomguard.observe import torch_memory
from oomguard.observe.exceptions import may_be_oom

# A result goes to its device where it takes no more than one part in so many of what is free: what comes next needs room too.
_PLACED_SHARE: Final = 2
# What one operation takes of the rows at once, as a part of what is free: its result, and what it holds meanwhile, come beside it.
_TAKEN_SHARE: Final = 8
_LOSSES: Final = frozenset({"nll_loss_forward", "nll_loss2d_forward"})  # classes last; in the axis behind rows
_HINT: Final = "compute it of some rows at a time, as `for rows in result.split(8)`"
_NONE, _MEAN, _SUM = range(3)  # the reductions of a loss, as torch numbers them


def placed(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a result that waited on the host on its device, or as ``RowsOnHost`` where that would leave too little room."""
    if _has_room(host.nbytes):
        try:
            return torch_memory.from_host(host, device)
        except Exception as error:  # in whatever words of whatever device
            if not may_be_oom(error):
                raise
    free = torch_memory.free_bytes()
    get_logger().warning(
        "a result stays on the host: the device would have too little room beside it",
        size_bytes=host.nbytes,
        free_bytes=free,
    )
    return waiting(host, device)


def waiting(host: torch.Tensor, device: torch.device) -> RowsOnHost:
    """Return a tensor of the host as one of its device, whose operations take as much of it at once as what is free now allows."""
    return RowsOnHost(host, device, max(1, (torch_memory.free_bytes() or 0) // _TAKEN_SHARE))


class RowsOnHost(torch.Tensor):  # type: ignore[misc]  # torch is not typed here
    """A tensor of its device, whose entries are in ``host``; operations take at most ``part_bytes`` of them to the device at once.

    What an operation gives is an ordinary tensor where the device has room for it. An operation that needs all rows at once, and
    every one that is not known, gets all of them, and runs out of memory where they do not fit.
    """

    host: torch.Tensor
    part_bytes: int

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device, part_bytes: int) -> RowsOnHost:
        """Wrap a tensor of the host."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=0, dtype=host.dtype, device=device
        )
        made.host, made.part_bytes = host, part_bytes
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation where the rows wait, or part by part, or on all rows."""
        del types
        # An operation that is made of others arrives whole in inference mode, and outside of it for a tensor that was made there.
        out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        arguments = bound(func, args, kwargs or {})
        first = next(leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, cls))
        if is_view(func) or is_copy(func) or _goes_to_host(func, arguments):
            return _on_host(func, arguments, first)
        if name_of(func) in _LOSSES:
            return _loss(func, arguments, first)
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        cut = cut_arguments(func, arguments, tensors, lambda tensor: isinstance(tensor, cls))
        if cut is not None:
            try:
                return _in_parts(func, arguments, cut, first)
            except Exception as error:  # that parts do not fit together is none of the program's
                if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or func._schema.is_mutable:
                    raise
        return _on_all(func, arguments)

    def __repr__(self, **_: Any) -> str:
        """Return what it is, and no entries: they may be gigabytes."""
        return f"RowsOnHost(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def __format__(self, spec: str) -> str:
        """Format a single entry as a number, as torch does for tensors of its own type."""
        return format(self.tolist(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def tolist(self) -> Any:
        """Return the entries as lists."""
        with torch_memory.on_host():
            return self.host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the entries as an array, as a tensor of the device would."""
        if self.device.type == "cpu" or force:
            with torch_memory.on_host():
                return self.host.numpy()
        return _on_device(self[:0]).numpy()  # torch refuses, in its own words

    def __array__(self, dtype: Any = None) -> Any:
        """Return the entries as an array."""
        return self.numpy().astype(dtype, copy=False) if dtype is not None else self.numpy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the entries as a tensor of the host."""
        return self.host.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> RowsOnHost:
        """Return another one with its own entries."""
        with torch_memory.on_host():
            made = RowsOnHost(self.host.clone(), self.device, self.part_bytes)
        memo[id(self)] = made
        return made


def _on_device(rows: RowsOnHost) -> torch.Tensor:
    """Return all rows on their device, where they may have no room."""
    return torch_memory.from_host(rows.host, rows.device)


def _goes_to_host(func: Any, arguments: Mapping[str, Any]) -> bool:
    device = arguments.get("device")
    return name_of(func) == "_to_copy" and device is not None and torch.device(device).type == "cpu"


def _call(func: Any, arguments: Mapping[str, Any]) -> Any:
    """Call an operation by its schema, whose first arguments may be positional only."""
    schema = func._schema.arguments
    positional = [arguments[argument.name] for argument in schema if not argument.kwarg_only]
    return func(*positional, **{argument.name: arguments[argument.name] for argument in schema if argument.kwarg_only})


def _on_all(func: Any, arguments: Mapping[str, Any]) -> Any:
    """Run an operation on all rows at once, on the device; what it changes is written back."""
    try:
        moved = {name: tree_map_only(RowsOnHost, _on_device, value) for name, value in arguments.items()}
    except Exception as error:
        if may_be_oom(error):
            error.add_note(f"oomguard: {name_of(func)} takes all rows of a result at once: {_HINT}")
        raise
    out, changed = _call(func, moved), [name for name in written(func) if isinstance(arguments[name], RowsOnHost)]
    for name in changed:
        _put(arguments[name], moved[name], 0, None)
    return _own(out, [(moved[name], arguments[name]) for name in written(func)])


def _own(out: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Return what an operation gave, with the caller's own tensors in the place of those that stood for them."""
    return tree_map_only(
        torch.Tensor, lambda tensor: next((own for stood, own in pairs if stood is tensor), tensor), out
    )


def _on_host(func: Any, arguments: Mapping[str, Any], first: RowsOnHost) -> Any:
    """Run an operation that computes nothing where the rows are; views of them stay there."""
    to_host = {name: _moved(value) for name, value in arguments.items()}
    with torch_memory.on_host():
        out = _call(func, to_host)
    if _goes_to_host(func, arguments):
        return out
    if func._schema.is_mutable and not is_view(func):
        for name in written(func):
            if not isinstance(arguments[name], RowsOnHost):
                arguments[name].copy_(to_host[name])
        return _own(out, [(to_host[name], arguments[name]) for name in written(func)])

    def back(tensor: torch.Tensor) -> torch.Tensor:
        if is_view(func) or not _has_room(tensor.nbytes):
            return RowsOnHost(tensor, first.device, first.part_bytes)
        return torch_memory.from_host(tensor, first.device)

    return tree_map_only(torch.Tensor, back, out)


def _moved(value: Any) -> Any:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        with torch_memory.on_host():
            return tensor.host if isinstance(tensor, RowsOnHost) else tensor.to("cpu")

    return tree_map_only(torch.Tensor, moved, value)


def _has_room(size_bytes: int) -> bool:
    free = torch_memory.free_bytes()
    return free is None or size_bytes * _PLACED_SHARE <= free


def _parts(arguments: Mapping[str, Any], cut: tuple[str, ...], first: RowsOnHost) -> Iterator[Callable[[Any], Any]]:
    """Yield, for each part, what runs a function of the arguments with its rows; fewer rows follow where one had no room."""
    rows = next(arguments[name].shape[0] for name in cut)
    row_bytes = max(1, *(arguments[name].nbytes // rows for name in cut))
    start, size = 0, max(1, min(rows, first.part_bytes // row_bytes))
    while start < rows:
        stop = min(rows, start + size)
        failed = False

        def run(function: Any, start: int = start, stop: int = stop) -> Any:
            nonlocal failed
            try:
                part = {n: _rows_of(value, start, stop) if n in cut else value for n, value in arguments.items()}
                return function(part, start, stop)
            except Exception as error:
                failed = may_be_oom(error) and stop - start > 1
                if not failed:
                    raise
            return None

        yield run
        if failed:
            torch_memory.release()
            size = max(1, (stop - start) // 2)
        else:
            start = stop


def _rows_of(value: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    if not isinstance(value, RowsOnHost):
        return value[start:stop]
    with torch_memory.on_host():
        rows = value.host[start:stop]
    return torch_memory.from_host(rows, value.device)


def _in_parts(func: Any, arguments: Mapping[str, Any], cut: tuple[str, ...], first: RowsOnHost) -> Any:
    """Run an operation on the rows of one part after another, and put together what it gives."""
    target = arguments["self"] if func._schema.is_mutable else None
    rows = arguments[cut[0]].shape[0]
    stored: list[torch.Tensor] = []
    around: Any = None

    def one(part: Mapping[str, Any], start: int, stop: int) -> None:
        nonlocal around
        leaves, around = tree_flatten(_call(func, part))
        if target is not None:
            _put(target, leaves[0], start, stop)
            return
        stored.extend(_room_for(leaf, rows, stop - start, first) for leaf in leaves[len(stored) :])
        for store, leaf in zip(stored, leaves, strict=True):
            _put(store, leaf, start, stop)

    for run in _parts(arguments, cut, first):
        run(one)
    return target if target is not None else tree_unflatten(stored, around)


def _room_for(like: torch.Tensor, rows: int, part_rows: int, first: RowsOnHost) -> torch.Tensor:
    """Return a tensor for all rows of what a part gave: on the device, or on the host where that would leave too little room."""
    shape = (rows, *like.shape[1:])
    if _has_room(like.nbytes // part_rows * rows):
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    with torch_memory.on_host():
        host = torch.empty(shape, dtype=like.dtype, device="cpu")
    return RowsOnHost(host, like.device, first.part_bytes)


def _put(store: torch.Tensor, part: torch.Tensor, start: int, stop: int | None) -> None:
    if not isinstance(store, RowsOnHost):
        store[start:stop] = part
        return
    with torch_memory.on_host():
        store.host[start:stop].copy_(part)


def _loss(func: Any, arguments: Mapping[str, Any], first: RowsOnHost) -> Any:
    """Return a loss over the rows and what it weighs: each part's sum, and the mean of all where that is asked for."""
    reduction = arguments["reduction"]
    if reduction == _NONE:
        return _in_parts(func, arguments, ("self", "target"), first)
    sums: list[tuple[torch.Tensor, torch.Tensor]] = []

    def one(part: Mapping[str, Any], start: int, stop: int) -> None:
        del start, stop
        sums.append(_call(func, {**part, "reduction": _SUM}))

    for run in _parts(arguments, ("self", "target"), first):
        run(one)
    total, weight = (torch.stack([pair[number] for pair in sums]).sum(0) for number in (0, 1))
    if not float(weight):  # with nothing to sum torch counts no weight: the targets do
        weight = _call(func, {**_without_rows(arguments), "reduction": _MEAN})[1] + weight
    return (total / weight if reduction == _MEAN else total), weight


def _without_rows(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {**arguments, "self": _rows_of(arguments["self"], 0, 1), "target": arguments["target"][:1]}
