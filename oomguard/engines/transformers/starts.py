"""Where transformers puts weights on a device: a model loaded there, and one that is moved there.

``pipeline(...)`` loads by the first and moves by the second, as ``from_pretrained(...).to("cuda")`` does.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, Final

from oomguard.engines.watched_start import ReadStart, StartHandler

_MODULE: Final = "transformers.modeling_utils"
_OWNER: Final = "PreTrainedModel"
_handlers: list[StartHandler] = []


def watch(handler: StartHandler) -> None:
    """Have loads and moves of models go through ``handler``, now or once transformers is imported; once per process."""
    if _handlers:
        return
    _handlers.append(handler)
    import wrapt

    if _MODULE in sys.modules:
        _wrap(importlib.import_module(_MODULE))  # waits where another thread is still importing it
    else:
        wrapt.register_post_import_hook(_wrap, _MODULE)


def _wrap(module: Any) -> None:
    import wrapt

    for name, read in _WATCHED.items():
        if hasattr(getattr(module, _OWNER, None), name):
            # A partial adds no frame between the user's code and the engine's.
            wrapt.wrap_function_wrapper(module, f"{_OWNER}.{name}", functools.partial(_handlers[0], read))


def _load(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from oomguard.engines.transformers.load import load_of
    from oomguard.engines.transformers.weights_start import WeightsStart

    return WeightsStart(load_of(wrapped, args, kwargs))


def _move(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from oomguard.engines.transformers.move import move_of
    from oomguard.engines.transformers.weights_start import WeightsStart

    return WeightsStart(move_of(wrapped, args, kwargs))


_WATCHED: Final[dict[str, ReadStart]] = {"from_pretrained": _load, "to": _move, "cuda": _move}
