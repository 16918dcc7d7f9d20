"""What an operation of torch does with the rows of its arguments, from its schema and a list of names."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_DATA: Final = Path(__file__).with_name("row_operations.toml")


@functools.cache
def _data() -> dict[str, Any]:
    return tomllib.loads(_DATA.read_text())


def name_of(operation: Any) -> str:
    """Return an operation's name, without its library and overload."""
    return str(operation._schema.name).partition("::")[2]


def is_view(operation: Any) -> bool:
    """Return whether an operation only looks at the same entries in another way."""
    aliases = [returned.alias_info for returned in operation._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def is_copy(operation: Any) -> bool:
    """Return whether an operation copies entries, or puts them somewhere, and computes none."""
    return name_of(operation) in _data()["copies"]


def bound(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operation's arguments by name, those that were not given with their default."""
    arguments = operation._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in arguments}


def written(operation: Any) -> tuple[str, ...]:
    """Return the arguments that an operation changes."""
    arguments = operation._schema.arguments
    return tuple(argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write)


def cut_arguments(
    operation: Any, arguments: Mapping[str, Any], tensors: Mapping[str, Any], is_of_rows: Callable[[Any], bool]
) -> tuple[str, ...] | None:
    """Return the arguments whose rows an operation takes one by one; None where it does not, or that is not known.

    Args:
        operation: the operation.
        arguments: its arguments by name.
        tensors: those of them that are tensors.
        is_of_rows: whether a tensor's rows wait to be taken.
    """
    import torch

    name = name_of(operation)
    of_rows = [argument for argument, tensor in tensors.items() if is_of_rows(tensor)]
    gives_tensors = all(str(returned.type) == "Tensor" for returned in operation._schema.returns)
    if "out" in arguments or not gives_tensors or torch.Tag.nondeterministic_seeded in operation.tags:
        return None  # parts would draw other random numbers
    if _is_pointwise(operation):
        return _pointwise(tensors, of_rows, written(operation))
    if name in _data()["along"]:
        dims, axes = arguments.get("dim"), tensors["self"].dim()
        listed = [dims] if isinstance(dims, int) else dims
        return ("self",) if listed and all(dim % axes > 0 for dim in listed) else None
    if name in _data()["by_entry"]:
        cut = (*_data()["by_entry"][name], *_added(name, tensors))
        whole = name == "native_layer_norm" and len(arguments["normalized_shape"]) >= tensors["input"].dim()
        return cut if set(of_rows) <= set(cut) and not whole else None
    return None


def _added(name: str, tensors: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the argument that is added to a product, where it has an entry for each row of it."""
    added = _data()["added"].get(name)
    if added is None:
        return ()
    first = tensors[_data()["by_entry"][name][0]]
    axes = 1 if name == "addmv" else first.dim()
    return (added,) if tensors[added].dim() == axes and tensors[added].shape[0] == first.shape[0] else ()


def _is_pointwise(operation: Any) -> bool:
    """Return whether each entry of the result is computed from the same entry of the arguments; torch marks no change in place."""
    import torch

    namespace, _, name = operation._schema.name.partition("::")
    plain = getattr(getattr(torch.ops, namespace), name.rstrip("_"), None) if _is_in_place(operation) else None
    overloads = [getattr(plain, overload) for overload in plain.overloads()] if plain is not None else [operation]
    return name in _data()["pointwise"] or any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _is_in_place(operation: Any) -> bool:
    """Return whether an operation changes what it gives back; torch marks it since 2.12, its name ends so in every version."""
    return bool(operation._schema.is_mutable) and name_of(operation).endswith("_")


def _pointwise(tensors: Mapping[str, Any], of_rows: Sequence[str], changed: Sequence[str]) -> tuple[str, ...] | None:
    """Return the arguments that have an entry for each row of the result, as they are broadcast."""
    axes = max(tensor.dim() for tensor in tensors.values())
    rows = max(tensors[argument].shape[0] if tensors[argument].dim() else 1 for argument in of_rows)
    cut = tuple(
        argument
        for argument, tensor in tensors.items()
        if axes and tensor.dim() == axes and tensor.shape[0] == rows != 1
    )
    return cut if {*of_rows, *changed} <= set(cut) else None
