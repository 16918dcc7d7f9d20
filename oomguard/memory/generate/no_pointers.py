"""Fake tensors have no memory: code that goes to their address reads none, and ends the process.

As fake_generate.py this imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch._subclasses.fake_tensor import FakeTensor

from oomguard.memory.generate.origin import own_line

# They go over a tensor's memory entry by entry, or tell where it is.
_GO_TO_MEMORY: Final = ("data_ptr", "apply_", "map_", "map2_")


@contextlib.contextmanager
def no_pointers(is_library: Callable[[str], bool]) -> Iterator[None]:
    """Raise what torch does where it knows of it, instead, while code that is no library's asks for the memory of a fake tensor."""

    def guarded(name: str) -> Callable[..., Any]:
        original = getattr(FakeTensor, name)

        def asked(self: Any, *given: Any, **named: Any) -> Any:
            if name == "data_ptr" and own_line(is_library) is None:
                return original(self, *given, **named)
            raise RuntimeError("Cannot access data pointer of a fake tensor")

        return asked

    for name in _GO_TO_MEMORY:
        setattr(FakeTensor, name, guarded(name))
    try:
        yield
    finally:
        for name in _GO_TO_MEMORY:
            delattr(FakeTensor, name)
