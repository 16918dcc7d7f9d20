"""Intercept the calls of ``LLM`` that a watch records; they are not changed."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from typing import Any, Final

from oomguard.engines.protocol import SeenCallHandler, SizeOfCall

_MODULE: Final = "vllm.entrypoints.llm"
_OWNER: Final = "LLM"
# The first argument of each has prompts, conversations or texts. Not every version has all of them.
METHODS: Final = (
    "generate",
    "chat",
    "beam_search",
    "encode",
    "embed",
    "classify",
    "reward",
    "score",
)
_handlers: list[SeenCallHandler] = []


def watch(handler: SeenCallHandler) -> None:
    """Route these calls through ``handler``, now or once the module is imported.

    Only the first call in a process has an effect.
    """
    if _handlers:
        return
    _handlers.append(handler)
    import wrapt

    if _MODULE in sys.modules:
        _wrap(importlib.import_module(_MODULE))
    else:
        wrapt.register_post_import_hook(_wrap, _MODULE)


def _wrap(module: Any) -> None:
    import wrapt

    for name in METHODS:
        if hasattr(getattr(module, _OWNER, None), name):
            wrapper = functools.partial(_handlers[0], _size)
            wrapt.wrap_function_wrapper(module, f"{_OWNER}.{name}", wrapper)


def _size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SizeOfCall:
    """Return the number of prompts, and the new tokens of each if all have the same limit."""
    if args:
        prompts = args[0]
    else:
        prompts = next(iter(kwargs.values()), None)
    if len(args) > 1:
        given = args[1]
    else:
        given = kwargs.get("sampling_params")
    tokens = getattr(given, "max_tokens", None)
    return _rows(prompts), None, tokens if isinstance(tokens, int) else None


def _rows(prompts: Any) -> int | None:
    """Return the number of prompts.

    A text, a record, a list of token ids and a conversation each count as one.
    """
    if isinstance(prompts, (str, Mapping)):
        return 1
    if not isinstance(prompts, (list, tuple)):
        return None
    is_one = bool(prompts) and (
        isinstance(prompts[0], int) or (isinstance(prompts[0], Mapping) and "role" in prompts[0])
    )
    if is_one:
        return 1
    return len(prompts)
