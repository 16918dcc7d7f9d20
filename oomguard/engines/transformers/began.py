"""What a call of ``generate`` changes beside its result, as it was before: where generators stand, and the user's own cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oomguard.engines.transformers.cache_argument import given_cache

if TYPE_CHECKING:
    from oomguard.engines.transformers.draws import States


@dataclass(frozen=True, slots=True)
class Began:
    """Where the generators stood, and the tokens that each layer of a given cache had; None: no cache is given, or not such a one."""

    states: States
    cache_tokens: tuple[int, ...] | None = None

    @classmethod
    def now(cls, main: Any, cache: Any) -> Began:
        """Note it for a call whose inputs are ``main``."""
        from oomguard.engines.transformers.draws import states_now

        layers = _plain_layers(cache)
        tokens = None if layers is None else tuple(int(layer.get_seq_length()) for layer in layers)
        return cls(states_now(getattr(main, "device", None)), tokens)

    def restore(self, arguments: Mapping[str, Any]) -> None:
        """Take from the cache what a call that failed has added: some of its layers may have more tokens than others."""
        layers = _plain_layers(given_cache(arguments))
        for number, layer in enumerate(layers or () if self.cache_tokens is not None else ()):
            tokens = self.cache_tokens[number] if number < len(self.cache_tokens or ()) else 0  # type: ignore[index]
            for name in ("keys", "values"):
                if (held := getattr(layer, name, None)) is not None and held.dim() > 1 and held.shape[-2] > tokens:
                    setattr(layer, name, held[..., :tokens, :])


def _plain_layers(cache: Any) -> list[Any] | None:
    """Return the layers of a cache that grows with every token and keeps all; None of any other."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list) or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
        return None
    return layers
