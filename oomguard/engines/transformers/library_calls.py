"""Read calls of sentence-transformers, PEFT and lm-eval, which run transformers models."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from oomguard.core.facts import FactValue
from oomguard.engines.protocol import SizeOfCall
from oomguard.engines.transformers.call_state import CallState
from oomguard.engines.transformers.forward import ForwardCall, no_weight
from oomguard.engines.transformers.generate import GenerateCall
from oomguard.engines.transformers.inputs import is_tensor, size_of_generate


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
        tensors = {}
        for name, value in dict(given or {}).items():
            if is_tensor(value):
                tensors[name] = value
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
        # Entries that are not tensors, such as the prompt's length, go to each part whole.
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
        # A part that fails leaves its hooks too.
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
        cls,
        lm: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        began: CallState | None = None,
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
        # A copy, because the loop removes entries.
        for number, hook in list(hooks.items()):
            function = getattr(hook, "func", hook)
            if getattr(function, "__name__", "") in _HOOKS:
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
