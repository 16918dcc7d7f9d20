"""Intercept loads of models on a device, and moves of models to a device.

``pipeline(...)`` loads and then moves a model, like ``from_pretrained(...).to("cuda")``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from oomguard.engines.protocol import ReadStart, StartHandler

_MODULE: Final = "transformers.modeling_utils"
_OWNER: Final = "PreTrainedModel"
_handlers: list[StartHandler] = []


def watch(handler: StartHandler) -> None:
    """Route loads and moves of models through ``handler``, now or once transformers is imported.

    Only the first call in a process has an effect.
    """
    if _handlers:
        return
    _handlers.append(handler)
    import wrapt

    if _MODULE in sys.modules:
        # The import waits if another thread is still importing the module.
        _wrap(importlib.import_module(_MODULE))
    else:
        wrapt.register_post_import_hook(_wrap, _MODULE)


def _wrap(module: Any) -> None:
    import wrapt

    for name, read in _WATCHED.items():
        if hasattr(getattr(module, _OWNER, None), name):
            # A partial adds no frame between the user's code and the engine's.
            wrapt.wrap_function_wrapper(
                module, f"{_OWNER}.{name}", functools.partial(_handlers[0], read)
            )


def _load(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from oomguard.engines.transformers.weights import WeightsStart, read_load

    return WeightsStart(read_load(wrapped, args, kwargs))


def _move(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from oomguard.engines.transformers.weights import WeightsStart, read_move

    return WeightsStart(read_move(wrapped, args, kwargs))


_WATCHED: Final[dict[str, ReadStart]] = {"from_pretrained": _load, "to": _move, "cuda": _move}
