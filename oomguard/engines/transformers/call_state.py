"""What a call of ``generate`` changes beside its result, as it was before: generators, the user's
own cache, the layers of a draft.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from oomguard.engines.transformers.inputs import given_cache

if TYPE_CHECKING:
    from oomguard.engines.transformers.random_draws import States


# What a call leaves on its model for the next one, a value for each row (Qwen-VL's
# ``rope_deltas``): put together after the last part.

_NAMES: Final = ("rope_deltas",)


@contextlib.contextmanager
def put_together(
    model: Any,
    kept: dict[int, list[tuple[Any, str, Any]]],
    start: int,
    rows_left: int,
) -> Iterator[None]:
    """Keep what a part that begins at row ``start`` leaves; with no rows left, leave what all parts
    have.

    Args:
        model: the model.
        kept: what earlier parts left, by their first row.
        start: the first row of the part.
        rows_left: rows that come after it.
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


# With it the model itself guesses tokens: its configuration says fewer layers meanwhile, and still
# does after a failure there.
EARLY_EXIT: Final = "assistant_early_exit"
_LAYERS: Final = "num_hidden_layers"


@dataclass(frozen=True, slots=True)
class Began:
    """What was there before a call.

    Attributes:
        states: where the generators stood.
        cache_tokens: the tokens that each layer of a given cache had; None: no cache is given, or
            not such a one.
        layers: how many layers the model's configuration says; None where it does not.
    """

    states: States
    cache_tokens: tuple[int, ...] | None = None
    layers: int | None = None

    @classmethod
    def now(cls, model: Any, main: Any, cache: Any) -> Began:
        """Note it for a call of ``model`` whose inputs are ``main``."""
        from oomguard.engines.transformers.random_draws import states_now

        layers = _plain_layers(cache)
        if layers is None:
            tokens = None
        else:
            tokens = tuple(int(layer.get_seq_length()) for layer in layers)
        layers = getattr(_config(model), _LAYERS, None)
        return cls(states_now(getattr(main, "device", None)), tokens, layers)

    def restore_layers(self, model: Any) -> None:
        """Have the model's configuration say as many layers as before."""
        config = _config(model)
        if self.layers is not None and getattr(config, _LAYERS, None) != self.layers:
            setattr(config, _LAYERS, self.layers)

    def restore(self, arguments: Mapping[str, Any]) -> None:
        """Take from the cache what a call that failed has added: some of its layers may have more
        tokens than others.
        """
        layers = _plain_layers(given_cache(arguments))
        for number, layer in enumerate(layers or () if self.cache_tokens is not None else ()):
            tokens = self.cache_tokens[number] if number < len(self.cache_tokens or ()) else 0  # type: ignore[index]
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
    """Return the layers of a cache that grows with every token and keeps all; None of any other."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list) or any(
        type(layer).__name__ != "DynamicLayer" for layer in layers
    ):
        return None
    return layers
