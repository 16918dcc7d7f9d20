"""Which calls of transformers are watched: a row for each method, with the class that reads a call
of it.

A class that overrides a watched method (Whisper's ``generate``) is watched there too: what it makes
of its arguments before it calls the method above cannot be split any more.
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

# A module of sentence-transformers that runs a model on a dict of features, and gives the dict back
# with what it found.


@dataclass(frozen=True, slots=True)
class FeaturesCall:
    """One call of such a module; ``features`` is the call of its model that they amount to."""

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
        return cls(args, kwargs, features, None if known else "its arguments are not known")

    @property
    def not_splittable(self) -> str | None:
        """Why its rows cannot be run apart; None where they can."""
        return self.why_not_rows or self.features.not_splittable

    @property
    def model(self) -> Any:
        """The model that runs."""
        return self.features.model

    @property
    def rows(self) -> int:
        """Rows of the call."""
        return self.features.rows

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of a row, padding included."""
        return self.features.prompt_tokens

    @property
    def max_new_tokens(self) -> int | None:
        """No tokens are generated."""
        return self.features.max_new_tokens

    @property
    def may_train(self) -> bool:
        """Whether gradients are recorded."""
        return self.features.may_train

    @property
    def several(self) -> Collection[int]:
        """How many entries a row may have in a field beside one: no other number."""
        return ()

    @property
    def weigh(self) -> Callable[[Any, int, int], float | None]:
        """What a mean over rows weighs: the result is a record of fields, none of which is known to
        be one.
        """
        return no_weight

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with rows ``start`` to ``stop`` of each feature."""
        _, cut = self.features.part(start, stop)
        given = self.args[0]
        return (type(given)({**given, **cut}),), dict(self.kwargs)

    def around(self, start: int, stop: int) -> AbstractContextManager[object]:
        """Return what notes whether the model draws: rows are cut, and nothing else."""
        return self.features.around(start, stop)

    def varied(self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None) -> str:
        """Return why nothing of it is done another way."""
        del changes, failed_in
        return "no cache holds the prompt"

    def problem(self, part: Any, rows: int) -> str | None:
        """Return None: every field of a part's result is looked at where it is put."""
        return self.features.problem(part, rows)

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return a result as it is: nothing was left out."""
        del start, stop
        return result

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the result as it is put together."""
        del place
        return result


# Methods of other libraries around ``generate`` that hand it more than rows: read as the call of it
# that they amount to.

# What PEFT hangs on each of its layers for the time of a call, in tuners/lora/model.py.
_HOOKS: Final = frozenset({"_adapter_names_pre_forward_hook", "_alora_offsets_pre_forward_hook"})


@dataclass(frozen=True, slots=True)
class AdaptersCall(GenerateCall):
    """``generate`` of a PEFT model; only with an adapter for each row is it more than the call that
    it makes.
    """

    @property
    def not_splittable(self) -> str | None:
        """Why its rows cannot be run apart; the call that it makes is looked at where it names no
        adapters.
        """
        if self.kwargs.get("adapter_names") is None:
            return "it names no adapters for its rows"
        return GenerateCall.not_splittable.fget(self)  # type: ignore[attr-defined,no-any-return]

    @contextlib.contextmanager
    def around(self, start: int, stop: int) -> Iterator[None]:
        """Run a part without the hooks of a call that failed, which PEFT leaves on the model with
        the adapters of its rows.
        """
        _remove_hooks(self.model)
        try:
            with GenerateCall.around(self, start, stop):
                yield
        finally:
            _remove_hooks(self.model)


@dataclass(frozen=True, slots=True)
class HarnessCall(GenerateCall):
    """``_model_generate`` of lm-evaluation-harness.

    It makes criteria for as many rows as it gets, that end all of them once each has said a stop
    word. Rows of a part may end earlier than in the whole batch: what comes after a stop word is
    cut off by the harness.
    """

    pad: int = 0

    @classmethod
    def of(
        cls, lm: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], began: Began | None = None
    ) -> HarnessCall:
        """Read a call; its arguments get the names that ``generate`` has for them."""
        named = _named(lm, args, kwargs)
        call = GenerateCall.of(lm.model, (), {"input_ids": named["context"]}, began)
        pad = getattr(lm.tokenizer, "pad_token_id", None)
        return cls(
            lm.model, (), named, call.rows, call.prompt_tokens, call.draws, call.began, pad=pad or 0
        )

    @property
    def pad_value(self) -> int | None:
        """The token after a row that ended earlier than others."""
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
    """Return a call's arguments under the names that ``generate`` has for them."""
    named = dict(inspect.signature(type(lm)._model_generate).bind(lm, *args, **kwargs).arguments)
    named.pop("self")
    named.update(named.pop("generation_kwargs", {}))
    return named


# What Trainer keeps of the batches that it has evaluated: on the device until the last one, unless
# ``eval_accumulation_steps`` is set.
#
# It hands them out as arrays on the host, so that they may wait there.

# Module, and the method that adds a batch's results to those before it.
KEEPS: Final = ("transformers.trainer_pt_utils", "EvalLoopContainer.add")
_MOVES: Final = "to_cpu_and_numpy"
# What holds results, and the thread that adds to it: another one's may be in the middle of that.
_kept: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class AddedResults:
    """Results of one batch, added to those before them: no call of a model, and run whole."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    model: None = None
    rows: int = 1
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    not_splittable: str = (
        "the results of all batches are kept together: set eval_accumulation_steps"
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
        """Return the arguments: there is one row."""
        del start, stop
        return self.args, dict(self.kwargs)

    def around(self, start: int, stop: int) -> AbstractContextManager[object]:
        """Return nothing to enter."""
        del start, stop
        return nullcontext()

    def varied(self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None) -> str:
        """Return why nothing of it is done another way."""
        del changes, failed_in
        return "there is no prompt"

    def problem(self, part: Any, rows: int) -> None:
        """Return nothing: it is run whole."""
        del part, rows

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return a result as it is: nothing was left out."""
        del start, stop
        return result

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the result as it is put together."""
        del place
        return result


def added(
    often: Handler,
    wrapped: Callable[..., Any],
    container: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Have results added, and note what holds them."""
    _kept[container] = threading.get_ident()
    return often(AddedResults.of, wrapped, container, args, kwargs)


def held_bytes() -> int:
    """Return the bytes on the device of the results that this thread's evaluations keep."""
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
    """Move these results to the host, as ``eval_accumulation_steps`` does; raise MemoryError where
    that has no room.
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
# The same for what is called often, through ``often``: a module of sentence-transformers calls a
# model's ``forward`` by its name.
OFTEN: Final[tuple[tuple[str, str, ReadCall], ...]] = (
    ("sentence_transformers.base.modules.transformer", "Transformer.forward", FeaturesCall.of),
)
_handlers: list[Handler] = []


def watch(handler: Handler, often: Handler, is_inside: Callable[[], bool]) -> None:
    """Have every watched call go through ``handler``, now or once its module is imported; once per
    process.

    The call of a model itself goes through ``often``, the outermost one: ``is_inside`` tells of
    those below.
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
            wrap(
                importlib.import_module(module)
            )  # waits where another thread is still importing it
        else:
            wrapt.register_post_import_hook(wrap, module)


def _put_around(handler: Callable[..., Any], method: str, module: Any) -> None:
    """Have calls of a method go through ``handler``; a version that has no such method stays as it
    is.
    """
    owner, _, name = method.partition(".")
    cls = getattr(module, owner, None)
    function = getattr(cls, name, None)
    if function is not None:
        setattr(cls, name, _watched_method(function, handler))


def _watched_method(
    function: Callable[..., Any], handler: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a plain function in the place of a method, so that objects and bound methods can be
    pickled and copied.
    """

    @functools.wraps(function)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return handler(types.MethodType(function, self), self, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again as it is
            # One frame of ours is enough above the engine's.
            # the same one
            raise error.with_traceback(_without_own_frames(error.__traceback__))  # noqa: B904

    return watched


def _without_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith(
        "oomguard."
    ):
        trace = trace.tb_next
    return trace


def _watch_forward(often: Handler, is_inside: Callable[[], bool], module: Any) -> None:
    """Give models a ``__call__`` of their own: a plain function, which torch.compile reads through
    where it compiles.
    """
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
        return  # a version that has no such method is imported all the same
    _put_around(functools.partial(_handlers[0], read), method, module)
    _wrap_overriding(getattr(module, owner), name, ReadOverriding(read))


def _wrap_overriding(base: Any, name: str, read: ReadCall) -> None:
    """Watch the method ``name`` of every class below ``base`` that overrides it, of those to come
    as well.
    """

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
