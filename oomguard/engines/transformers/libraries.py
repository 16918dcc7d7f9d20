"""Methods of other libraries around ``generate`` that hand it more than rows: read as the call of it that they amount to."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from oomguard.engines.protocol import SizeOfCall
from oomguard.engines.transformers.began import Began
from oomguard.engines.transformers.generate import GenerateCall
from oomguard.engines.transformers.inputs import size_of_generate

# What PEFT hangs on each of its layers for the time of a call, in tuners/lora/model.py.
_HOOKS: Final = frozenset({"_adapter_names_pre_forward_hook", "_alora_offsets_pre_forward_hook"})


@dataclass(frozen=True, slots=True)
class AdaptersCall(GenerateCall):
    """``generate`` of a PEFT model; only with an adapter for each row is it more than the call that it makes."""

    @property
    def not_splittable(self) -> str | None:
        """Why its rows cannot be run apart; the call that it makes is looked at where it names no adapters."""
        if self.kwargs.get("adapter_names") is None:
            return "it names no adapters for its rows"
        return GenerateCall.not_splittable.fget(self)  # type: ignore[attr-defined,no-any-return]

    @contextlib.contextmanager
    def around(self, start: int, stop: int) -> Iterator[None]:
        """Run a part without the hooks of a call that failed, which PEFT leaves on the model with the adapters of its rows."""
        _remove_hooks(self.model)
        try:
            with GenerateCall.around(self, start, stop):
                yield
        finally:
            _remove_hooks(self.model)


@dataclass(frozen=True, slots=True)
class HarnessCall(GenerateCall):
    """``_model_generate`` of lm-evaluation-harness.

    It makes criteria for as many rows as it gets, that end all of them once each has said a stop word. Rows of a part may end
    earlier than in the whole batch: what comes after a stop word is cut off by the harness.
    """

    pad: int = 0

    @classmethod
    def of(cls, lm: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], began: Began | None = None) -> HarnessCall:
        """Read a call; its arguments get the names that ``generate`` has for them."""
        named = _named(lm, args, kwargs)
        call = GenerateCall.of(lm.model, (), {"input_ids": named["context"]}, began)
        pad = getattr(lm.tokenizer, "pad_token_id", None)
        return cls(lm.model, (), named, call.rows, call.prompt_tokens, call.draws, call.began, pad=pad or 0)

    @property
    def pad_value(self) -> int | None:
        """The token after a row that ended earlier than others."""
        return self.pad


def _remove_hooks(model: Any) -> None:
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for number in [
            n for n, hook in hooks.items() if getattr(getattr(hook, "func", hook), "__name__", "") in _HOOKS
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
