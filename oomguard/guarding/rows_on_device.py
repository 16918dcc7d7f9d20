"""A result that fills so much of its device that what a program computes of it may have no room there.

It is handed out as a tensor that lies where it was made, and whose operations run as they are. One that runs out of memory is made
once more with the rows taken part by part, and what it gives waits on the host. This imports torch, so only code that has it
already may import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map_only

from oomguard.guarding.beginning import Generators
from oomguard.guarding.rows_on_host import RowsOnHost, waiting
from oomguard.log import get_logger
from oomguard.observe import torch_memory
from oomguard.observe.exceptions import may_be_oom

# Copies in float32 that must have room beside a result: `float()`, a softmax of it, its logarithm, and their product (an entropy).
_COPIES: Final = 4
_FLOAT_BYTES: Final = 4


def handed_out(result: Any) -> Any:
    """Return a call's result, with the tensors in it that leave too little room for what is computed of them as ``RowsOnDevice``."""
    fields = _fields(result)
    if not fields:
        return result
    free = torch_memory.free_bytes()
    changed = {} if free is None else {name: _handed(value, free) for name, value in fields.items()}
    changed = {name: value for name, value in changed.items() if value is not fields[name]}
    if not changed:
        return result
    if isinstance(result, torch.Tensor):
        return changed[None]
    if type(result) is tuple:
        return tuple(changed.get(number, value) for number, value in enumerate(result))
    for name, value in changed.items():
        result[name] = value
    return result


def _fields(result: Any) -> dict[Any, Any]:
    if isinstance(result, torch.Tensor):
        return {None: result}
    if isinstance(result, Mapping):
        return dict(result) if hasattr(result, "__setitem__") else {}
    return dict(enumerate(result)) if type(result) is tuple else {}


def _handed(value: Any, free_bytes: int) -> Any:
    """Return a tensor, or several that a program may stack, as they are handed out."""
    tensors = value if type(value) is tuple else (value,)
    if not tensors or not all(map(_may_be_handed, tensors)):
        return value
    if sum(tensor.numel() for tensor in tensors) * _FLOAT_BYTES * _COPIES <= free_bytes:
        return value
    handed = tuple(tensor.as_subclass(RowsOnDevice) for tensor in tensors)
    return handed if type(value) is tuple else handed[0]


def _may_be_handed(value: Any) -> bool:
    is_own = type(value) is torch.Tensor and value.layout is torch.strided and value.is_floating_point()
    return bool(is_own and value.dim() > 1 and not value.requires_grad and torch_memory.counts(value))


class RowsOnDevice(torch.Tensor):  # type: ignore[misc]  # torch is not typed here
    """A tensor like any other, whose operations are made over parts of its rows where they run out of memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation as it is, and part by part where that has no room."""
        del types
        plain_args, plain_kwargs = _changed(args, _plain), _changed(kwargs or {}, _plain)
        generators, failed = Generators.now(), None
        with torch._C.DisableTorchFunctionSubclass():
            try:
                out = func(*plain_args, **plain_kwargs)
            except Exception as error:  # in whatever words of whatever device
                if not may_be_oom(error):
                    raise
                failed = error.with_traceback(None)
            else:
                return out if isinstance(out, (int, float, str, bool, torch.Size)) else _results(out)
        del plain_args, plain_kwargs
        try:
            generators.put_back()  # what an operation drew before it failed is drawn again
            return _in_parts(func, args, kwargs or {})
        except Exception as error:  # raised, unless it is the same failure once more
            if not may_be_oom(error):
                raise
            for note in getattr(error, "__notes__", ()):
                failed.add_note(note)
            raise failed from None
        finally:
            del failed  # a frame that names its own exception is a cycle

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary tensor with its own entries."""
        memo[id(self)] = made = _plain(self).clone()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary tensor."""
        return _plain(self).__reduce_ex__(protocol)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _changed(value: Any, change: Any) -> Any:
    return tree_map_only(RowsOnDevice, change, value)


def _results(out: Any) -> Any:
    """Return what an operation gave, which may be too large for the next one as well."""
    if isinstance(out, torch.Tensor):
        return handed_out(out)
    return tree_map_only(torch.Tensor, handed_out, out) if type(out) in (tuple, list) else out


def _in_parts(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the host's copy of the rows, of which parts come to the device; what it changes is written back."""
    torch_memory.release()
    moved: dict[int, tuple[torch.Tensor, RowsOnHost, int]] = {}

    def to_host(tensor: RowsOnDevice) -> RowsOnHost:
        if id(tensor) not in moved:
            own = _plain(tensor)
            with torch_memory.on_host(), torch.inference_mode(mode=False):  # one that is made there counts no changes
                host = own.to("cpu", copy=True)
            moved[id(tensor)] = own, waiting(host, own.device), host._version
        return moved[id(tensor)][1]

    get_logger().warning("an operation on a result has no room: it takes the rows part by part", operation=_name(func))
    out = func(*_changed(args, to_host), **_changed(kwargs, to_host))
    for own, rows, version in moved.values():
        if rows.host._version != version:
            own.copy_(rows.host)
    return out


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))
