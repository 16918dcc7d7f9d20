"""Intercept the watched calls of transformers and of libraries around it.

A class that overrides a watched method (Whisper's ``generate``) is watched there too. Its own code
before the inherited method cannot be split any more.

The modules that read a call load when the first call is read: most guarded programs never need
them.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.facts import FactValue
from oomguard.engines.protocol import (
    Handler,
    OverridingReader,
    ReadCall,
    SizeOfCall,
    StatefulReader,
)
from oomguard.probe import torch_memory

if TYPE_CHECKING:
    from oomguard.engines.transformers.call_state import CallState
    from oomguard.engines.transformers.forward import ForwardCall
    from oomguard.engines.transformers.generate import GenerateCall
    from oomguard.engines.transformers.library_calls import AdaptersCall, FeaturesCall, HarnessCall

# Find and move the results that Trainer keeps on the device during an evaluation.


_MOVES: Final = "to_cpu_and_numpy"
# Containers of results, each with the thread that fills it; only that thread may move them.
_kept: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class AddedResults:
    """The call that adds one batch's results to the earlier ones; it is never split."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    model: None = None
    rows: int = 1
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    not_splittable: str = (
        "Trainer collects the results of all batches on the device: set eval_accumulation_steps"
    )
    estimated_row_bytes: int | None = None
    waits_on_host: bool = False
    may_train: bool = False
    pad_value: int | None = None
    puts_back: Collection[str] = ()
    phase: str | None = None
    weigh: Callable[[Any, int, int], float | None] | None = None
    several: Collection[int] = ()
    layout: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, container: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AddedResults:
        """Read a call."""
        del container
        return cls(args, kwargs)

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return all arguments: there is only one row."""
        del start, stop
        return self.args, dict(self.kwargs)

    def around(self, start: int, stop: int) -> AbstractContextManager[object]:
        """Return an empty context."""
        del start, stop
        return nullcontext()

    def varied(self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None) -> str:
        """Return why the call has no variants."""
        del changes, failed_in
        return "the call has no prompt"

    def problem(self, part: Any, rows: int) -> None:
        """Return None: the call is not split."""
        del part, rows

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return the result: no variant left anything out."""
        del start, stop
        return result

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the joined result."""
        del place
        return result


def add_results(
    often: Handler,
    wrapped: Callable[..., Any],
    container: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Add a batch's results, and remember their container."""
    _kept[container] = threading.get_ident()
    return often(AddedResults.of, wrapped, container, args, kwargs)


def held_bytes() -> int:
    """Return the device bytes of results that this thread's evaluations keep."""
    import torch
    from torch.utils._pytree import tree_leaves

    size_bytes = 0
    for container in _own():
        for leaf in tree_leaves(container.tensors):
            if isinstance(leaf, torch.Tensor) and torch_memory.counts(leaf):
                size_bytes += leaf.nbytes
    return size_bytes


def move_to_host() -> None:
    """Move these results to the host, as ``eval_accumulation_steps`` does.

    Raises:
        MemoryError: they do not fit there.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    for container in _own():
        with torch_memory.on_host():
            container.tensors = tree_map_only(
                torch.Tensor, lambda tensor: tensor.to("cpu", copy=True), container.tensors
            )
            getattr(container, _MOVES)()


def _own() -> list[Any]:
    thread = threading.get_ident()
    own = []
    # A copy, because other threads add containers, and the garbage collector removes them.
    for container, of in list(_kept.items()):
        if of == thread and hasattr(container, _MOVES):
            own.append(container)
    return own


def _begin_generate(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallState:
    from oomguard.engines.transformers.generate import GenerateCall

    return GenerateCall.begin(model, args, kwargs)


def _read_generate(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], began: CallState
) -> GenerateCall:
    from oomguard.engines.transformers.generate import GenerateCall

    return GenerateCall.of(model, args, kwargs, began)


def _size_of_generate(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SizeOfCall:
    from oomguard.engines.transformers.inputs import size_of_generate

    return size_of_generate(model, args, kwargs)


def _read_adapters(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], began: CallState
) -> AdaptersCall:
    from oomguard.engines.transformers.library_calls import AdaptersCall

    call = AdaptersCall.of(model, args, kwargs, began)
    assert isinstance(call, AdaptersCall)  # noqa: S101 - ``of`` makes an object of its own class
    return call


def _read_harness(
    lm: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], began: CallState
) -> HarnessCall:
    from oomguard.engines.transformers.library_calls import HarnessCall

    return HarnessCall.of(lm, args, kwargs, began)


def _size_of_harness(lm: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SizeOfCall:
    from oomguard.engines.transformers.library_calls import size_of_harness_call

    return size_of_harness_call(lm, args, kwargs)


def _read_features(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FeaturesCall:
    from oomguard.engines.transformers.library_calls import FeaturesCall

    return FeaturesCall.of(module, args, kwargs)


def _read_forward(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ForwardCall:
    from oomguard.engines.transformers.forward import ForwardCall

    return ForwardCall.of(model, args, kwargs)


# Module, and the method with which Trainer adds a batch's results to the earlier ones.
KEEPS: Final = ("transformers.trainer_pt_utils", "EvalLoopContainer.add")
# Module, method, and the reader of its calls.
WATCHED: Final[tuple[tuple[str, str, ReadCall], ...]] = (
    (
        "transformers.generation.utils",
        "GenerationMixin.generate",
        StatefulReader(_read_generate, _begin_generate, _size_of_generate),
    ),
    (
        "peft.peft_model",
        "PeftModel.generate",
        OverridingReader(StatefulReader(_read_adapters, _begin_generate, _size_of_generate)),
    ),
    (
        "lm_eval.models.huggingface",
        "HFLM._model_generate",
        StatefulReader(_read_harness, _begin_generate, _size_of_harness),
    ),
)
# The same for frequent calls, which go through ``often``. A sentence-transformers module calls its
# model's ``forward`` directly.
OFTEN: Final[tuple[tuple[str, str, ReadCall], ...]] = (
    ("sentence_transformers.base.modules.transformer", "Transformer.forward", _read_features),
)
_handlers: list[Handler] = []


def watch(handler: Handler, often: Handler, is_inside: Callable[[], bool]) -> None:
    """Route every watched call through ``handler``, now or once its module is imported.

    Only the first call in a process has an effect. The call of a model itself goes through
    ``often``, unless ``is_inside`` returns that it runs inside another watched call.
    """
    if _handlers:
        return
    _handlers.append(handler)
    import wrapt

    wraps = [(module, functools.partial(_wrap, method, read)) for module, method, read in WATCHED]
    for module, method, read in OFTEN:
        handle = functools.partial(often, read)
        wraps.append((module, functools.partial(_put_around, handle, method)))
    wraps.append(
        ("transformers.modeling_utils", functools.partial(_watch_forward, often, is_inside))
    )
    wraps.append(
        (KEEPS[0], functools.partial(_put_around, functools.partial(add_results, often), KEEPS[1]))
    )
    for module, wrap in wraps:
        if module in sys.modules:
            # import_module waits if another thread is still importing it.
            wrap(importlib.import_module(module))
        else:
            wrapt.register_post_import_hook(wrap, module)


def _put_around(handler: Callable[..., Any], method: str, module: Any) -> None:
    """Route calls of a method through ``handler``; do nothing if this version lacks the method."""
    owner, _, name = method.partition(".")
    cls = getattr(module, owner, None)
    function = getattr(cls, name, None)
    if function is not None:
        setattr(cls, name, _watched_method(function, handler))


def _watched_method(
    function: Callable[..., Any], handler: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a plain function that replaces a method, so that bound methods can be pickled."""

    @functools.wraps(function)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return handler(types.MethodType(function, self), self, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again below
            # The user sees only one frame of oomguard above the engine's frames.
            raise error.with_traceback(_without_own_frames(error.__traceback__))  # noqa: B904

    return watched


def _without_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith(
        "oomguard."
    ):
        trace = trace.tb_next
    return trace


def _watch_forward(often: Handler, is_inside: Callable[[], bool], module: Any) -> None:
    """Give models a plain ``__call__``, through which torch.compile can trace."""
    import torch

    base = torch.nn.Module
    is_compiling = torch.compiler.is_compiling

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch.compile cannot trace a guard, and `generate` calls the model for each token.
        if is_compiling() or is_inside():
            return base.__call__(self, *args, **kwargs)
        return often(_read_forward, functools.partial(base.__call__, self), self, args, kwargs)

    call.__name__ = "__call__"
    call.__qualname__ = "PreTrainedModel.__call__"
    module.PreTrainedModel.__call__ = call


def _wrap(method: str, read: ReadCall, module: Any) -> None:
    owner, _, name = method.partition(".")
    if not hasattr(getattr(module, owner, None), name):
        # This version lacks the method.
        return
    _put_around(functools.partial(_handlers[0], read), method, module)
    _wrap_overriding(getattr(module, owner), name, OverridingReader(read))


def _wrap_overriding(base: Any, name: str, read: ReadCall) -> None:
    """Watch the method ``name`` in every present and future subclass that overrides it."""

    def wrap(cls: Any) -> None:
        own = cls.__dict__.get(name)
        if isinstance(own, types.FunctionType):
            setattr(cls, name, _watched_method(own, functools.partial(_handlers[0], read)))

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        wrap(cls)

    below = list(base.__subclasses__())
    # A class with two bases comes up twice, and must not be wrapped twice.
    seen = set()
    while below:
        cls = below.pop()
        if cls not in seen:
            seen.add(cls)
            wrap(cls)
            below += cls.__subclasses__()
    # A base with a method of its own would lose it.
    if "__init_subclass__" not in base.__dict__:
        base.__init_subclass__ = classmethod(init_subclass)
