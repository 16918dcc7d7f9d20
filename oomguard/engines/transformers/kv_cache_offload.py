"""Offload the KV cache of a ``generate`` call to the host, or quantize it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from packaging.version import Version

from oomguard.core.facts import FactValue
from oomguard.engines.transformers.call_state import EARLY_EXIT
from oomguard.engines.transformers.chunked_forward import ONE_CALL, compared_families
from oomguard.engines.transformers.inputs import NAMES, given_cache
from oomguard.probe import torch_memory

if TYPE_CHECKING:
    from oomguard.engines.transformers.generate import GenerateCall


_OPTION: Final = "cache_implementation"
# The option that keeps a cache's layers on the host, by the call's present option.
_ON_HOST: Final[Mapping[str | None, str]] = {
    None: "offloaded",
    "dynamic": "offloaded",
    "static": "offloaded_static",
}
QUANTIZED: Final = "quantized"
# Before this release the stream that fetches the next layer did not wait for the one that computes
# (transformers/cache_utils.py). With 5.17 an H100 gave other tokens.
_STREAMS_WAIT: Final = Version("5.20")
# The libraries that quantize a cache, the one with more bits first. hqq is missing because its
# memory use cannot be predicted.
_BACKENDS: Final = ("fp8", "quanto")
_MAKES_CACHE: Final = "_prepare_cache_for_generation"
# These options remove tokens from the cache.
_TAKES_BACK: Final = ("assistant_model", "prompt_lookup_num_tokens", EARLY_EXIT)


def with_cache_placement(call: GenerateCall, value: FactValue) -> GenerateCall | str:
    """Return the call with its cache kept as ``value`` says, or why that is impossible."""
    why_not = _why_not(call)
    if why_not is not None:
        return why_not
    if value == QUANTIZED:
        return _quantized(call)
    return _on_host(call, value)


def _on_host(call: GenerateCall, value: FactValue) -> GenerateCall | str:
    now = call.option(_OPTION)
    family = str(getattr(call.model.config, "model_type", ""))
    if _ON_HOST.get(now) != value:
        return f"its cache is {now or 'dynamic'}"
    if family not in compared_families():
        return f"models of the type {family} were not compared with a cache on the host"
    if torch_memory.is_simulated():
        return replace(call, cache_on_host=True)  # transformers' own version needs CUDA streams
    if call.model.device.type != "cuda":
        return (
            f"the model is on {call.model.device.type}: transformers offloads a cache only from "
            "CUDA devices"
        )
    if _transformers() < _STREAMS_WAIT:
        return f"transformers before {_STREAMS_WAIT} may give other tokens with a cache on the host"
    return replace(call, cache_on_host=True, kwargs={**call.kwargs, _OPTION: str(value)})


def _transformers() -> Version:
    import transformers

    return Version(Version(transformers.__version__).base_version)


def _why_not(call: GenerateCall) -> str | None:
    config = getattr(call.model, "config", None)
    if getattr(config, "is_encoder_decoder", True):
        return "encoder and decoder each have a cache"
    if call.option("use_cache") is False:
        return "use_cache is off, so there is no cache"
    if given_cache(call.kwargs) is not None:
        return "the call uses its own cache"
    if call.weigh is not None:
        return "the result contains the cache"
    own = next(
        (name for name in _TAKES_BACK if call.kwargs.get(name) is not None or call.option(name)),
        None,
    )
    if own is None:
        return None
    return f"{own} removes tokens from the cache"


def _quantized(call: GenerateCall) -> GenerateCall | str:
    if call.option(_OPTION) not in (None, "dynamic"):
        return f"its cache is {call.option(_OPTION)}"
    backend, why_not = _backend(call.model)
    if backend is None:
        return why_not
    return replace(
        call, kwargs={**call.kwargs, _OPTION: QUANTIZED, "cache_config": {"backend": backend}}
    )


def _backend(model: Any) -> tuple[str | None, str]:
    """Return the first backend that can quantize a model's cache, and "".

    If none can, return None and the reasons.
    """
    try:
        from transformers import QuantizedCache
    except ImportError:
        return None, "this transformers cannot quantize a cache"
    reasons = []
    for backend in _BACKENDS:
        try:
            QuantizedCache(backend=backend, config=model.config)
        except Exception as error:  # noqa: BLE001
            # A missing library, a model with other layers, or an unknown backend.
            reasons.append(f"{backend}: {str(error).strip()}")
        else:
            return backend, ""
    return None, "; ".join(dict.fromkeys(reasons))


@contextlib.contextmanager
def cache_on_host(model: Any) -> Iterator[None]:
    """Keep the cache of ``generate`` on the host of a simulated device.

    On CUDA, transformers does so itself.
    """
    made = getattr(model, _MAKES_CACHE, None)
    if made is None or not torch_memory.is_simulated():
        yield
        return

    def make(*args: Any, **kwargs: Any) -> Any:
        out = made(*args, **kwargs)
        arguments = next(value for value in (*args, *kwargs.values()) if isinstance(value, dict))
        for name in NAMES:
            if arguments.get(name) is not None:
                kind: Any = type(arguments[name])
                arguments[name].__class__ = _class_on_host(kind)
        return out

    with ONE_CALL:
        setattr(model, _MAKES_CACHE, make)
        try:
            yield
        finally:
            delattr(model, _MAKES_CACHE)


@functools.cache
def _class_on_host(kind: Any) -> Any:
    return type(kind.__name__, (_OnHost, kind), {})


class _OnHost:
    """A cache on the host of a simulated device.

    As in transformers, only the present layer and the next one are on the device.
    """

    layers: list[Any]

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Add the states of a layer, which is on the device meanwhile."""
        for number in (layer_idx, (layer_idx + 1) % max(1, len(self.layers))):
            if number < len(self.layers):
                _bring(self.layers[number])
        out = super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[misc]
        _send(self.layers[layer_idx])
        return out

    def reorder_cache(self, beam_idx: Any) -> None:
        """Reorder the rows of every layer on its present device."""
        for layer in self.layers:
            with torch_memory.on_host(really=_is_on_host(layer)):
                layer.reorder_cache(beam_idx)


def _is_on_host(layer: Any) -> bool:
    return bool(getattr(layer, "_oomguard_on_host", False))


def _send(layer: Any) -> None:
    layer.keys, layer.values = torch_memory.to_host(layer.keys), torch_memory.to_host(layer.values)
    layer._oomguard_on_host = True


def _bring(layer: Any) -> None:
    if _is_on_host(layer):
        layer.keys = torch_memory.from_host(layer.keys, layer.device)
        layer.values = torch_memory.from_host(layer.values, layer.device)
        layer._oomguard_on_host = False
