"""Intercept the watched calls of transformers and of libraries around it.

A class that overrides a watched method (Whisper's ``generate``) is watched there too. Its own code
before the inherited method cannot be split any more.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from oomguard.core.facts import FactValue
from oomguard.engines.protocol import Handler, ReadBegun, ReadCall, ReadOverriding, SizeOfCall
from oomguard.engines.transformers.call_state import Began
from oomguard.engines.transformers.forward import ForwardCall
from oomguard.engines.transformers.generate import GenerateCall
from oomguard.engines.transformers.inputs import is_tensor, size_of_generate
from oomguard.engines.transformers.loss import no_weight
from oomguard.probe import torch_memory


@dataclass(frozen=True, slots=True)
class FeaturesCall:
    """A call of a sentence-transformers module; ``features`` is the model call inside it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    features: ForwardCall
    why_not_rows: str | None
    estimated_row_bytes: int | None = None
    waits_on_host: bool = False
    pad_value: int | None = None
    puts_back: Collection[str] = ()
    phase: str | None = None
    layout: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FeaturesCall:
        """Read a call."""
        model = getattr(module, "auto_model", None) or module.model
        if args:
            given = args[0]
        else:
            given = kwargs.get("features")
        tensors = {name: value for name, value in dict(given or {}).items() if is_tensor(value)}
        features = ForwardCall.of(model, (), tensors)
        known = (
            len(args) == 1
            and isinstance(given, Mapping)
            and not any(map(is_tensor, kwargs.values()))
        )
        why_not = None
        if not known:
            why_not = "oomguard does not know its arguments"
        return cls(args, kwargs, features, why_not)

    @property
    def not_splittable(self) -> str | None:
        """Why the call cannot be split into rows; None if it can."""
        return self.why_not_rows or self.features.not_splittable

    @property
    def model(self) -> Any:
        """The model that runs."""
        return self.features.model

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.features.rows

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of a row, with padding."""
        return self.features.prompt_tokens

    @property
    def max_new_tokens(self) -> int | None:
        """0: it generates no tokens."""
        return self.features.max_new_tokens

    @property
    def may_train(self) -> bool:
        """Whether gradients are recorded."""
        return self.features.may_train

    @property
    def several(self) -> Collection[int]:
        """Other numbers of entries per row: none."""
        return ()

    @property
    def weigh(self) -> Callable[[Any, int, int], float | None]:
        """The weight of a mean over rows: unknown, because no result field is known to be one."""
        return no_weight

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with rows ``start`` to ``stop`` of each feature."""
        _, cut = self.features.part(start, stop)
        given = self.args[0]
        return (type(given)({**given, **cut}),), dict(self.kwargs)

    def around(self, start: int, stop: int) -> AbstractContextManager[object]:
        """Return the context in which the model draws the whole call's random numbers."""
        return self.features.around(start, stop)

    def varied(self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None) -> str:
        """Return why the call has no variants."""
        del changes, failed_in
        return "the call has no KV cache that holds a prompt"

    def problem(self, part: Any, rows: int) -> str | None:
        """Return None: collecting the results checks every field."""
        return self.features.problem(part, rows)

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return the result: no variant left anything out."""
        del start, stop
        return result

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the joined result."""
        del place
        return result


# PEFT installs these hooks on its layers during a call (tuners/lora/model.py).
_HOOKS: Final = frozenset({"_adapter_names_pre_forward_hook", "_alora_offsets_pre_forward_hook"})


@dataclass(frozen=True, slots=True)
class AdaptersCall(GenerateCall):
    """``generate`` of a PEFT model; it matters only if each row has its own adapter."""

    @property
    def not_splittable(self) -> str | None:
        """Why the call cannot be split into rows.

        Without adapter names, the inner call of ``generate`` is split instead.
        """
        if self.kwargs.get("adapter_names") is None:
            return "it names no adapter for each row"
        return GenerateCall.not_splittable.fget(self)  # type: ignore[attr-defined,no-any-return]

    @contextlib.contextmanager
    def around(self, start: int, stop: int) -> Iterator[None]:
        """Run a part without the hooks that a failed PEFT call left on the model."""
        _remove_hooks(self.model)
        try:
            with GenerateCall.around(self, start, stop):
                yield
        finally:
            _remove_hooks(self.model)


@dataclass(frozen=True, slots=True)
class HarnessCall(GenerateCall):
    """``_model_generate`` of lm-evaluation-harness.

    Its stopping criteria end a batch once every row has a stop word. So rows of a part may end
    earlier than in the whole batch, but the harness cuts everything after a stop word.
    """

    pad: int = 0

    @classmethod
    def of(
        cls, lm: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], began: Began | None = None
    ) -> HarnessCall:
        """Read a call, and give its arguments the names that ``generate`` uses."""
        named = _named(lm, args, kwargs)
        call = GenerateCall.of(lm.model, (), {"input_ids": named["context"]}, began)
        pad = getattr(lm.tokenizer, "pad_token_id", None)
        return cls(
            lm.model, (), named, call.rows, call.prompt_tokens, call.draws, call.began, pad=pad or 0
        )

    @property
    def pad_value(self) -> int | None:
        """The token that follows a row which ended earlier than others."""
        return self.pad


def _remove_hooks(model: Any) -> None:
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for number in [
            n
            for n, hook in hooks.items()
            if getattr(getattr(hook, "func", hook), "__name__", "") in _HOOKS
        ]:
            del hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)


def size_of_harness_call(lm: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SizeOfCall:
    """Return how large a call of lm-evaluation-harness is."""
    return size_of_generate(lm.model, (), _named(lm, args, kwargs))


def _named(lm: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments with the names that ``generate`` uses."""
    named = dict(inspect.signature(type(lm)._model_generate).bind(lm, *args, **kwargs).arguments)
    named.pop("self")
    named.update(named.pop("generation_kwargs", {}))
    return named


# Trainer keeps the results of evaluated batches on the device until the last batch, unless
# ``eval_accumulation_steps`` is set. It returns them as arrays on the host, so they may move there.

# Module, and the method that adds a batch's results to the earlier ones.
KEEPS: Final = ("transformers.trainer_pt_utils", "EvalLoopContainer.add")
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


def added(
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

    kept = (
        leaf
        for container in _own()
        for leaf in tree_leaves(container.tensors)
        if isinstance(leaf, torch.Tensor)
    )
    return sum(tensor.nbytes for tensor in kept if torch_memory.counts(tensor))


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
    return [
        container
        for container, of in list(_kept.items())
        if of == thread and hasattr(container, _MOVES)
    ]


# Module, method, and the reader of its calls.
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
# The same for frequent calls, which go through ``often``. A sentence-transformers module calls its
# model's ``forward`` directly.
OFTEN: Final[tuple[tuple[str, str, ReadCall], ...]] = (
    ("sentence_transformers.base.modules.transformer", "Transformer.forward", FeaturesCall.of),
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
    wraps += [
        (module, functools.partial(_put_around, functools.partial(often, read), method))
        for module, method, read in OFTEN
    ]
    wraps.append(
        ("transformers.modeling_utils", functools.partial(_watch_forward, often, is_inside))
    )
    wraps.append(
        (KEEPS[0], functools.partial(_put_around, functools.partial(added, often), KEEPS[1]))
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
        if is_compiling() or is_inside():
            return base.__call__(self, *args, **kwargs)
        return often(ForwardCall.of, functools.partial(base.__call__, self), self, args, kwargs)

    call.__name__ = "__call__"
    call.__qualname__ = "PreTrainedModel.__call__"
    module.PreTrainedModel.__call__ = call


def _wrap(method: str, read: ReadCall, module: Any) -> None:
    owner, _, name = method.partition(".")
    if not hasattr(getattr(module, owner, None), name):
        return  # this version lacks the method
    _put_around(functools.partial(_handlers[0], read), method, module)
    _wrap_overriding(getattr(module, owner), name, ReadOverriding(read))


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
    seen = set()
    while below:
        cls = below.pop()
        if cls not in seen:
            seen.add(cls)
            wrap(cls)
            below += cls.__subclasses__()
    if "__init_subclass__" not in base.__dict__:
        base.__init_subclass__ = classmethod(init_subclass)
