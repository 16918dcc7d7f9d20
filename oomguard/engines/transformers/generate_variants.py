"""Run ``generate`` as a variant: chunked prefill, other attention or cache, fewer tokens."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from packaging.version import Version

from oomguard.core.facts import FactValue
from oomguard.engines.transformers.call_state import EARLY_EXIT
from oomguard.engines.transformers.forward_variants import (
    ONE_CALL,
    compared_families,
    has_leading_padding,
    use_attention,
    why_not_use_attention,
)
from oomguard.engines.transformers.forward_variants import STATE as _SCORES
from oomguard.engines.transformers.forward_variants import (
    why_not_in_chunks as why_no_forward_in_chunks,
)
from oomguard.engines.transformers.independence import CALLBACK_NAMES, why_not_separate
from oomguard.engines.transformers.inputs import (
    CACHE_NAMES,
    Media,
    given_cache,
    main_input,
    why_packed,
)
from oomguard.probe import torch_memory

if TYPE_CHECKING:
    from oomguard.engines.transformers.generate import GenerateCall

# The KV cache of a ``generate`` call may be on the host, or quantized.


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
    why_not = _why_not_on_host(call)
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
        # The offloaded cache of transformers needs CUDA streams.
        return replace(call, cache_on_host=True)
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


def _why_not_on_host(call: GenerateCall) -> str | None:
    config = getattr(call.model, "config", None)
    if getattr(config, "is_encoder_decoder", True):
        return "encoder and decoder each have a cache"
    if call.option("use_cache") is False:
        return "use_cache is off, so there is no cache"
    if given_cache(call.kwargs) is not None:
        return "the call uses its own cache"
    if call.weigh is not None:
        return "the result contains the cache"
    for name in _TAKES_BACK:
        if call.kwargs.get(name) is not None or call.option(name):
            return f"{name} removes tokens from the cache"
    return None


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
        # The method's parameters differ between versions of transformers, but one is the dict.
        arguments = next(filter(_is_dict, (*args, *kwargs.values())))
        for name in CACHE_NAMES:
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


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


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


# Arguments with one entry per prompt token, cut with the prompt.
_ALONG_PROMPT: Final = ("attention_mask", "token_type_ids")
# Arguments that apply to the whole prompt, or read it.
_OF_WHOLE_PROMPT: Final = (
    "inputs_embeds",
    "position_ids",
    "mm_token_type_ids",
    "past_key_values",
    "encoder_outputs",
    "decoder_input_ids",
    "prefix_allowed_tokens_fn",
    "custom_generate",
    "assistant_model",
    *CALLBACK_NAMES,
)


def with_shorter_prompt(call: GenerateCall, tokens: FactValue) -> GenerateCall | str:
    """Return the call with ``tokens`` prompt tokens per row, or why that is impossible.

    A decoder keeps the last tokens, like vLLM's ``truncate_prompt_tokens``. An encoder keeps the
    first ones, like a tokenizer's ``truncation=True``.
    """
    kept = int(tokens)
    whole = call.prompt_tokens
    if (why_not := _shorter_prompt_why_not(call)) is not None:
        return why_not
    if whole is None or whole <= kept:
        return f"the prompt has at most {kept} tokens"
    encodes = _encodes(call)
    if encodes:
        part = slice(0, kept)
    else:
        part = slice(whole - kept, whole)

    def cut(value: Any) -> Any:
        if getattr(value, "shape", ())[1:2] == (whole,):
            return value[:, part]
        return value

    named = ("inputs", "input_ids", *_ALONG_PROMPT)
    # Views need no memory, even on a full simulated device.
    with torch_memory.on_host():
        if call.args:
            args = (cut(call.args[0]), *call.args[1:])
        else:
            args = ()
        kwargs = dict(call.kwargs)
        for name in kwargs.keys() & set(named):
            kwargs[name] = cut(kwargs[name])
        whole_prompt = main_input(call.model, call.args, call.kwargs)
        if encodes:
            prompt = None
        else:
            prompt = whole_prompt[:, : whole - kept]
    # `max_length` includes the prompt, which is shorter now.
    if not encodes:
        kwargs.pop("max_length", None)
        kwargs["max_new_tokens"] = call.max_new_tokens
    return replace(call, args=args, kwargs=kwargs, prompt_tokens=kept, left_out=prompt)


def with_left_out(left_out: Any, tokens: Any, start: int, stop: int) -> Any:
    """Return the tokens of rows ``start`` to ``stop`` after the cut part of their prompts.

    A row may have several sequences.
    """
    import torch

    before = left_out[start:stop].to(tokens.device)
    return torch.cat([before.repeat_interleave(len(tokens) // len(before), dim=0), tokens], dim=1)


def _shorter_prompt_why_not(call: GenerateCall) -> str | None:
    """Return why the prompt cannot be cut; None if it can."""
    import torch

    if (
        not isinstance(main_input(call.model, call.args, call.kwargs), torch.Tensor)
        or call.max_new_tokens is None
    ):
        return "the number of prompt tokens is unknown"
    given: Mapping[str, Any] = call.kwargs
    for name in _OF_WHOLE_PROMPT:
        if given.get(name) is not None and given[name] != []:
            return f"the argument {name} belongs to the whole prompt"
    if call.weigh is not None:
        return "the result's fields include values of the whole prompt"
    if call.option("min_length") and not _encodes(call):
        return "min_length includes the prompt"
    if call.media() != Media({}):
        return "images or other media have their places in the prompt"
    return None


def _encodes(call: GenerateCall) -> bool:
    return bool(getattr(getattr(call.model, "config", None), "is_encoder_decoder", False))


# Options that must be off: chunks already, or states of the whole prompt.
_NOT_WITH: Final = ("prefill_chunk_size", "output_hidden_states", "output_attentions")
# With these options transformers processes the prompt in its own way, so every model call is
# chunked instead.
_SPECULATIVE: Final = ("assistant_model", "prompt_lookup_num_tokens", EARLY_EXIT)
_NO_PROMPT: Final = ("inputs_embeds", "encoder_outputs", "custom_generate")
# transformers' function for the prompt. A call that fails in it has generated no token yet.
_PREFILL: Final = "_prefill"


def generate_another_way(
    call: GenerateCall, changes: Mapping[str, FactValue], failed_in: Collection[str] | None
) -> GenerateCall | str:
    """Return the call with these settings changed, or why that is impossible.

    ``failed_in`` are the functions in its failure's traceback; None: it has not run yet.
    """
    why_not = _why_not_again(call, failed_in) or why_not_separate(call.kwargs)
    changed = call
    for name, value in changes.items():
        found = why_not or _WAYS[name](changed, value)
        if isinstance(found, str):
            return found
        changed = found
    if failed_in is not None and changed.kwargs.get("streamer") is not None:
        changed = replace(
            changed, kwargs={**changed.kwargs, "streamer": AfterPrompt(changed.kwargs["streamer"])}
        )
    return changed


@contextlib.contextmanager
def as_changed(model: Any, attention: str | None, *, cache_is_on_host: bool) -> Iterator[None]:
    """Run a model with this attention and cache in the block; ``attention`` None: its own."""
    with contextlib.ExitStack() as stack:
        if attention is not None:
            stack.enter_context(use_attention(model, attention))
        if cache_is_on_host:
            stack.enter_context(cache_on_host(model))
        yield


def _in_chunks(call: GenerateCall, tokens: FactValue) -> GenerateCall | str:
    """Return the call with a prefill in chunks of ``tokens`` tokens, or why that is impossible.

    The tokens stay the same, and activations are those of one chunk.
    """
    why_not = _why_not(call)
    tokens = int(tokens)
    if why_not is None and (call.prompt_tokens is None or call.prompt_tokens <= tokens):
        why_not = "the prompt already fits into one chunk"
    if why_not is not None:
        return why_not
    if _speculates(call):
        return replace(call, chunk_tokens=tokens)
    return replace(call, kwargs={**call.kwargs, "prefill_chunk_size": tokens})


def _attending(call: GenerateCall, implementation: FactValue) -> GenerateCall | str:
    """Return the call with another attention implementation, or why that is impossible."""
    mask = call.kwargs.get("attention_mask")
    why_not = why_not_use_attention(
        call.model, {_SCORES: call.option(_SCORES), "attention_mask": mask}
    )
    if why_not is None and call.weigh is not None and has_leading_padding(mask):
        why_not = "the result's cache includes padding before a row, whose entries would change"
    return why_not or replace(call, attention=str(implementation))


def _with_fewer_tokens(call: GenerateCall, tokens: FactValue) -> GenerateCall | str:
    """Return the call with ``max_new_tokens``, which ends its answers earlier."""
    least = int(call.option("min_new_tokens") or 0)
    in_all = int(call.option("min_length") or 0)
    if not getattr(getattr(call.model, "config", None), "is_encoder_decoder", False):
        in_all -= call.prompt_tokens or 0
    if max(least, in_all) > int(tokens):
        return f"the call needs at least {max(least, in_all)} new tokens"
    if call.kwargs.get("custom_generate") is not None:
        return "custom_generate may use the tokens in an unknown way"
    # If a call has both limits, transformers logs a warning.
    kept = {}
    for name, value in call.kwargs.items():
        if name != "max_length":
            kept[name] = value
    return replace(call, kwargs={**kept, "max_new_tokens": int(tokens)})


_WAYS: Final[Mapping[str, Callable[[GenerateCall, FactValue], GenerateCall | str]]] = {
    "attn_implementation": _attending,
    "prefill_chunk_size": _in_chunks,
    "cache_implementation": with_cache_placement,
    "max_new_tokens": _with_fewer_tokens,
    "truncate_prompt_tokens": with_shorter_prompt,
}


def _why_not(call: GenerateCall) -> str | None:
    """Return why a prefill in chunks would change the result; None if it would not."""
    config = getattr(call.model, "config", None)
    own = getattr(call.model, "generation_config", None)
    if getattr(config, "is_encoder_decoder", True) or not hasattr(own, "prefill_chunk_size"):
        return "the model cannot process a prompt in chunks"
    if call.option("use_cache") is False:
        return "chunked prefill needs the KV cache, and use_cache is off"
    for name in (*_NOT_WITH, *_NO_PROMPT):
        if call.kwargs.get(name) is not None or (name in _NOT_WITH and call.option(name)):
            return f"chunked prefill cannot be combined with {name}"
    if call.weigh is not None and has_leading_padding(call.kwargs.get("attention_mask")):
        return "the result's cache includes padding before a row, whose entries would change"
    if call.media() != Media({}):
        return "images or other media cannot be processed in chunks"
    return why_packed(call.kwargs) or why_no_forward_in_chunks(call.model, {})


def _why_not_again(call: GenerateCall, failed_in: Collection[str] | None) -> str | None:
    """Return why a failed call cannot run again; None if it can."""
    if given_cache(call.kwargs) is not None and call.began.cache_tokens is None:
        return "the failed call's entries in the given cache cannot be removed"
    if (
        call.kwargs.get("streamer") is not None
        and failed_in is not None
        and _PREFILL not in failed_in
    ):
        return "the streamer has already received tokens"
    return None


def _speculates(call: GenerateCall) -> bool:
    """Return whether anything other than the model drafts tokens."""
    return any(call.kwargs.get(name) is not None or call.option(name) for name in _SPECULATIVE)


class AfterPrompt:
    """A streamer that has received the prompt, and does not receive it again."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._had_prompt = True

    def put(self, value: Any) -> None:
        """Pass tokens on, except the first ones, which are the prompt."""
        if self._had_prompt:
            self._had_prompt = False
        else:
            self._streamer.put(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streamer, name)
