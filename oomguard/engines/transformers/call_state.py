"""Record and restore the state that a call of ``generate`` changes besides its result.

This is the random generators, the user's own KV cache, and the layer count of a draft model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from oomguard.engines.transformers.inputs import given_cache

if TYPE_CHECKING:
    from oomguard.engines.transformers.random_draws import States


# Attributes that a call leaves on its model for the next one, with a value per row (Qwen-VL's
# ``rope_deltas``). After the last part they are joined.
_NAMES: Final = ("rope_deltas",)


@contextlib.contextmanager
def join_row_state(
    model: Any,
    kept: dict[int, list[tuple[Any, str, Any]]],
    start: int,
    rows_left: int,
) -> Iterator[None]:
    """Record the row attributes that a part leaves; after the last part, join them all.

    Args:
        model: the model.
        kept: what earlier parts left, by their first row.
        start: the first row of the part.
        rows_left: the number of rows after it.
    """
    yield
    kept[start] = [
        (module, name, value)
        for module in model.modules()
        for name in _NAMES
        if getattr(value := getattr(module, name, None), "ndim", 0) > 0
    ]
    if rows_left == 0 and len(kept) > 1:
        import torch

        for found in zip(*(kept[begin] for begin in sorted(kept)), strict=False):
            module, name, _ = found[0]
            setattr(module, name, torch.cat([value for _, _, value in found]))


# With this option the model drafts tokens itself: its configuration has fewer layers meanwhile, and
# a failure leaves it so.
EARLY_EXIT: Final = "assistant_early_exit"
_LAYERS: Final = "num_hidden_layers"


@dataclass(frozen=True, slots=True)
class CallState:
    """The state before a call.

    Attributes:
        states: the states of the random generators.
        cache_tokens: the tokens in each layer of a given cache. None: there is no cache, or not one
            that only grows.
        layers: the layer count in the model's configuration; None if it has none.
    """

    states: States
    cache_tokens: tuple[int, ...] | None = None
    layers: int | None = None

    @classmethod
    def now(cls, model: Any, main: Any, cache: Any) -> CallState:
        """Record the present state for a call of ``model`` with the inputs ``main``."""
        from oomguard.engines.transformers.random_draws import generator_states

        layers = _plain_layers(cache)
        if layers is None:
            tokens = None
        else:
            tokens = tuple(int(layer.get_seq_length()) for layer in layers)
        layers = getattr(_config(model), _LAYERS, None)
        return cls(generator_states(getattr(main, "device", None)), tokens, layers)

    def restore_layers(self, model: Any) -> None:
        """Restore the layer count in the model's configuration."""
        config = _config(model)
        if self.layers is not None and getattr(config, _LAYERS, None) != self.layers:
            setattr(config, _LAYERS, self.layers)

    def restore(self, arguments: Mapping[str, Any]) -> None:
        """Remove what a failed call added to the cache; some layers may have more than others."""
        if self.cache_tokens is None:
            return
        layers = _plain_layers(given_cache(arguments))
        for number, layer in enumerate(layers or ()):
            if number < len(self.cache_tokens):
                tokens = self.cache_tokens[number]
            else:
                tokens = 0
            for name in ("keys", "values"):
                if (
                    (held := getattr(layer, name, None)) is not None
                    and held.dim() > 1
                    and held.shape[-2] > tokens
                ):
                    setattr(layer, name, held[..., :tokens, :])


def _config(model: Any) -> Any:
    return getattr(getattr(model, "base_model", model), "config", None)


def _plain_layers(cache: Any) -> list[Any] | None:
    """Return the layers of a cache that only grows; None for any other cache."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list) or any(
        type(layer).__name__ != "DynamicLayer" for layer in layers
    ):
        return None
    return layers
