"""Which calls of transformers are watched: a row for each method, with the class that reads a call of it."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

from oomguard.engines.protocol import Handler, ReadCall
from oomguard.engines.transformers.generate import GenerateCall

# Module, method in it, and how a call of it is read.
WATCHED: Final[tuple[tuple[str, str, ReadCall], ...]] = (
    ("transformers.generation.utils", "GenerationMixin.generate", GenerateCall.of),
)
_handlers: list[Handler] = []


def watch(handler: Handler) -> None:
    """Have every watched call go through ``handler``, now or once its module is imported; once per process."""
    if _handlers:
        return
    _handlers.append(handler)
    import wrapt

    for module, method, read in WATCHED:
        wrap = functools.partial(_wrap, method, read)
        if module in sys.modules:
            wrap(sys.modules[module])
        else:
            wrapt.register_post_import_hook(wrap, module)


def _wrap(method: str, read: ReadCall, module: Any) -> None:
    import wrapt

    # A partial adds no frame of ours between the user's code and the engine's.
    wrapt.wrap_function_wrapper(module, method, functools.partial(_handlers[0], read))
