"""Intercept the vLLM calls that start an engine; every front end goes through one of them.

``LLM(...)`` and its subclasses call ``LLMEngine.from_engine_args``. ``LLMEngine(...)`` and
``AsyncLLM(...)``, also through ``from_vllm_config``, get a finished configuration. oomguard
explains their failure but cannot change anything.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from oomguard.engines.protocol import StartHandler

# Module, and function in it.
WATCHED: Final = (
    ("vllm.v1.engine.llm_engine", "LLMEngine.from_engine_args"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.__init__"),
    ("vllm.v1.engine.async_llm", "AsyncLLM.from_engine_args"),
    ("vllm.v1.engine.async_llm", "AsyncLLM.__init__"),
)
_handlers: list[StartHandler] = []


def watch(handler: StartHandler) -> None:
    """Route every start through ``handler``, now or once its module is imported.

    Only the first call in a process has an effect.
    """
    if _handlers:
        return
    _handlers.append(handler)
    import wrapt

    functions: dict[str, list[str]] = {}
    for module, name in WATCHED:
        functions.setdefault(module, []).append(name)
    for module, names in functions.items():
        wrap = functools.partial(_wrap, names)
        if module in sys.modules:
            # import_module waits if another thread is still importing it.
            wrap(importlib.import_module(module))
        else:
            wrapt.register_post_import_hook(wrap, module)


def _wrap(names: list[str], module: Any) -> None:
    import wrapt

    for name in names:
        owner, _, function = name.partition(".")
        # Other versions have other names, and those are not watched.
        if hasattr(getattr(module, owner, None), function):
            # A partial adds no frame between the user's code and the engine's.
            wrapt.wrap_function_wrapper(module, name, functools.partial(_handlers[0], _read))


def _read(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from oomguard.engines.vllm.in_process.start import VllmStart

    return VllmStart(wrapped, args, kwargs)
