"""Which calls of transformers are watched: a row for each method, with the class that reads a call of it.

A class that overrides a watched method (Whisper's ``generate``) is watched there too: what it makes of its arguments before
it calls the method above cannot be split any more.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, Final

from oomguard.engines.protocol import Handler, ReadBegun, ReadCall, ReadOverriding
from oomguard.engines.transformers.features import FeaturesCall
from oomguard.engines.transformers.forward import ForwardCall
from oomguard.engines.transformers.generate import GenerateCall
from oomguard.engines.transformers.inputs import size_of_generate
from oomguard.engines.transformers.libraries import AdaptersCall, HarnessCall, size_of_harness_call
from oomguard.engines.transformers.results import KEEPS, added

# Module, method in it, and how a call of it is read.
WATCHED: Final[tuple[tuple[str, str, ReadCall], ...]] = (
    (
        "transformers.generation.utils",
        "GenerationMixin.generate",
        ReadBegun(GenerateCall.of, GenerateCall.begin, size_of_generate),
    ),
    (
        "peft.peft_model",
        "PeftModel.generate",
        ReadOverriding(ReadBegun(AdaptersCall.of, GenerateCall.begin, size_of_generate)),
    ),
    (
        "lm_eval.models.huggingface",
        "HFLM._model_generate",
        ReadBegun(HarnessCall.of, GenerateCall.begin, size_of_harness_call),
    ),
)
# The same for what is called often, through ``often``: a module of sentence-transformers calls a model's ``forward`` by its name.
OFTEN: Final[tuple[tuple[str, str, ReadCall], ...]] = (
    ("sentence_transformers.base.modules.transformer", "Transformer.forward", FeaturesCall.of),
)
_handlers: list[Handler] = []


def watch(handler: Handler, often: Handler, is_inside: Callable[[], bool]) -> None:
    """Have every watched call go through ``handler``, now or once its module is imported; once per process.

    The call of a model itself goes through ``often``, the outermost one: ``is_inside`` tells of those below.
    """
    if _handlers:
        return
    _handlers.append(handler)
    import wrapt

    wraps = [(module, functools.partial(_wrap, method, read)) for module, method, read in WATCHED]
    wraps += [
        (module, functools.partial(_put_around, functools.partial(often, read), method))
        for module, method, read in OFTEN
    ]
    wraps.append(("transformers.modeling_utils", functools.partial(_watch_forward, often, is_inside)))
    wraps.append((KEEPS[0], functools.partial(_put_around, functools.partial(added, often), KEEPS[1])))
    for module, wrap in wraps:
        if module in sys.modules:
            wrap(importlib.import_module(module))  # waits where another thread is still importing it
        else:
            wrapt.register_post_import_hook(wrap, module)


def _put_around(handler: Callable[..., Any], method: str, module: Any) -> None:
    """Have calls of a method go through ``handler``; a version that has no such method stays as it is."""
    owner, _, name = method.partition(".")
    cls = getattr(module, owner, None)
    function = getattr(cls, name, None)
    if function is not None:
        setattr(cls, name, _watched_method(function, handler))


def _watched_method(function: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function in the place of a method, so that objects and bound methods can be pickled and copied."""

    @functools.wraps(function)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return handler(types.MethodType(function, self), self, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again as it is
            # One frame of ours is enough above the engine's.
            raise error.with_traceback(_without_own_frames(error.__traceback__))  # noqa: B904 - the same one

    return watched


def _without_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("oomguard."):
        trace = trace.tb_next
    return trace


def _watch_forward(often: Handler, is_inside: Callable[[], bool], module: Any) -> None:
    """Give models a ``__call__`` of their own: a plain function, which torch.compile reads through where it compiles."""
    import torch

    base, is_compiling = torch.nn.Module, torch.compiler.is_compiling

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or is_inside():
            return base.__call__(self, *args, **kwargs)
        return often(ForwardCall.of, functools.partial(base.__call__, self), self, args, kwargs)

    call.__name__, call.__qualname__ = "__call__", "PreTrainedModel.__call__"
    module.PreTrainedModel.__call__ = call


def _wrap(method: str, read: ReadCall, module: Any) -> None:
    owner, _, name = method.partition(".")
    if not hasattr(getattr(module, owner, None), name):
        return  # a version that has no such method is imported all the same
    _put_around(functools.partial(_handlers[0], read), method, module)
    _wrap_overriding(getattr(module, owner), name, ReadOverriding(read))


def _wrap_overriding(base: Any, name: str, read: ReadCall) -> None:
    """Watch the method ``name`` of every class below ``base`` that overrides it, of those to come as well."""

    def wrap(cls: Any) -> None:
        own = cls.__dict__.get(name)
        if isinstance(own, types.FunctionType):
            setattr(cls, name, _watched_method(own, functools.partial(_handlers[0], read)))

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        wrap(cls)

    below, seen = list(base.__subclasses__()), set()
    while below:
        cls = below.pop()
        if cls not in seen:
            seen.add(cls)
            wrap(cls)
            below += cls.__subclasses__()
    if "__init_subclass__" not in base.__dict__:
        base.__init_subclass__ = classmethod(init_subclass)
