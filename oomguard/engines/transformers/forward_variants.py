"""Run a model's forward in chunks of tokens, or with other attention.

In chunks, the KV cache of a causal model carries the earlier tokens.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.core.files import read_tables
from oomguard.engines.transformers.independence import rope_by_length, user_code, why_state_of
from oomguard.engines.transformers.inputs import (
    CACHE_NAMES,
    compute_on_host,
    given_cache,
    name_in,
    why_packed,
    with_cache,
)

# Arguments that are cut along the tokens, or are the same for each chunk. A call with any other
# tensor is not chunked.
_ALONG_TOKENS: Final = frozenset({"input_ids", "inputs_embeds", "position_ids", "token_type_ids"})
_MASK: Final = "attention_mask"
_ALIKE: Final = frozenset({"cache_position", *CACHE_NAMES, "use_cache", "labels"})
# Outputs that must be off, because they would have to be joined along other axes.
_STATES: Final = ("output_hidden_states", "output_attentions", "output_router_logits")
_MASK_AXES: Final = 2
_FILE: Final = Path(__file__).with_name("compared_models.toml")
# A variant changes the model while it runs (chunks, other attention), so one call runs at a time.
ONE_CALL: Final = threading.RLock()
# transformers' class names for causal language models.
_CAUSAL: Final = ("ForCausalLM", "LMHeadModel")


def why_not_in_chunks(model: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return why a call of a model cannot run in chunks of tokens; None if it can."""
    return _why_not_model(model) or _why_not_arguments(model, arguments)


def _why_not_model(model: Any) -> str | None:
    config: Any = getattr(model, "config", None)
    name = type(model).__name__
    family = str(getattr(config, "model_type", ""))
    if (
        not name.endswith(_CAUSAL)
        or getattr(config, "is_encoder_decoder", True)
        or name_in(model) is None
    ):
        return (
            f"{name} is not known to read its tokens in order, with a KV cache of the earlier ones"
        )
    looks = []
    for module in model.modules():
        causal = getattr(module, "is_causal", None)
        if isinstance(causal, bool):
            looks.append(causal)
    if not looks or not all(looks):
        return f"{name} may look at later tokens"
    if family not in compared_families():
        return f"models of the type {family or name} were not compared in chunks"
    kind, _ = rope_by_length(config)
    if kind is not None:
        return f"positions by {kind} depend on how many tokens are read at once"
    if (own := user_code(model)) is not None:
        return f"{own} is your own code"
    return why_state_of(model)


def _why_not_arguments(model: Any, arguments: Mapping[str, Any]) -> str | None:
    for option in _STATES:
        if arguments.get(option, getattr(model.config, option, False)):
            return f"{option} cannot be joined along the tokens"
    named = inspect.signature(type(model).forward).parameters
    if arguments.get("labels") is not None:
        # `forward` hands arguments without a parameter of their own to the loss function.
        for name in arguments:
            if name not in named and name not in CACHE_NAMES:
                return f"the argument {name} belongs to the loss of the whole call"
    for name, value in arguments.items():
        if not _is_of_tokens(name, value):
            return f"the argument {name} has no axis of tokens"
    return why_packed(arguments)


@functools.cache
def _compared_models() -> Mapping[str, Any]:
    """Return the contents of compared_models.toml."""
    return next(iter(read_tables("compared models", [_FILE]).values()))


@functools.cache
def compared_families() -> frozenset[str]:
    """Return the model types whose outputs in chunks were compared with those at once."""
    return frozenset(_compared_models()["chunks"]["model_types"])


def _is_of_tokens(name: str, value: Any) -> bool:
    if name == _MASK:
        return value is None or getattr(value, "ndim", 0) == _MASK_AXES
    if name == "return_dict":
        # A tuple cannot be joined along its tokens.
        return value is not False
    if name == "logits_to_keep":
        return value is None or isinstance(value, int)
    return (
        name in _ALONG_TOKENS
        or name in _ALIKE
        or value is None
        or isinstance(value, (bool, int, float, str))
    )


def has_leading_padding(mask: Any) -> bool:
    """Return whether a row begins with padding.

    Padding looks at all other tokens alike, so its outputs would change with the chunk.
    """
    if mask is None or getattr(mask, "ndim", 0) != _MASK_AXES:
        return False
    return compute_on_host(lambda shown: bool((shown[:, 0] == 0).any()), mask)


@contextlib.contextmanager
def run_in_chunks(model: Any, tokens: int) -> Iterator[None]:
    """Run calls of a model in chunks of ``tokens`` tokens in the block, if possible."""
    with ONE_CALL:
        yield from _replaced(model, tokens)


def _replaced(model: Any, tokens: int) -> Iterator[None]:
    own = vars(model).get("forward")
    forward = model.forward
    names = tuple(inspect.signature(type(model).forward).parameters)[1:]

    # generate reads the signature, and asks for few logits if forward takes logits_to_keep.
    @functools.wraps(forward)
    def chunked(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("input_ids") is not None:
            main = given.get("input_ids")
        else:
            main = given.get("inputs_embeds")
        if (
            main is None
            or main.ndim < 2
            or main.shape[1] <= tokens
            or why_not_in_chunks(model, given) is not None
        ):
            return forward(*args, **kwargs)
        return _in_chunks(model, forward, given, tokens)

    model.forward = chunked
    try:
        yield
    finally:
        # accelerate's hooks may have set one on the model itself.
        if own is None:
            del model.forward
        else:
            model.forward = own


def _in_chunks(model: Any, forward: Any, given: dict[str, Any], tokens: int) -> Any:
    import torch
    from transformers import DynamicCache

    if given.get("input_ids") is not None:
        main = given["input_ids"]
    else:
        main = given["inputs_embeds"]
    total = main.shape[1]
    # The loss is a mean over all tokens, so it is computed once, from the joined logits.
    labels = given.pop("labels", None)
    keeps_cache = given.get("use_cache")
    cache = given_cache(given)
    name = name_in(model) or CACHE_NAMES[0]
    if cache is None:
        cache = DynamicCache(config=model.config)
    before = cache.get_seq_length()
    kept = int(given.get("logits_to_keep") or 0) or total
    logits = list[Any]()
    for start in range(0, total, tokens):
        stop = min(total, start + tokens)
        wanted = kept - (total - stop)
        part = _part(given, start, stop, before)
        if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
            # 0 would mean all positions, so a chunk without a wanted one computes its last.
            part["logits_to_keep"] = min(max(1, wanted), stop - start)
        result = forward(
            **{**with_cache(part, name, cache), "use_cache": True, "return_dict": True}
        )
        if wanted > 0:
            logits.append(result.logits[:, -wanted:])
    if len(logits) == 1:
        result.logits = logits[0]
    else:
        result.logits = torch.cat(logits, dim=1)
    # The chunks needed a cache, but the user did not ask for one.
    if not (model.config.use_cache if keeps_cache is None else keeps_cache):
        setattr(result, name, None)
    if labels is not None:
        result.loss = model.loss_function(
            logits=result.logits, labels=labels, vocab_size=model.config.vocab_size
        )
    # The loss was set as an attribute, which an output without a loss does not list as a key.
    fields = {}
    for field in ("loss", *result.keys()):
        value = getattr(result, field)
        if value is not None:
            fields[field] = value
    return type(result)(**fields)


def _part(given: Mapping[str, Any], start: int, stop: int, before: int) -> dict[str, Any]:
    part = dict(given)
    for name in _ALONG_TOKENS:
        if part.get(name) is not None:
            part[name] = part[name][:, start:stop]
    if part.get(_MASK) is not None:
        part[_MASK] = part[_MASK][:, : before + stop]
    if part.get("cache_position") is not None:
        part["cache_position"] = part["cache_position"][start:stop]
    return part


# Eager attention keeps a score matrix, which torch's own attention does not need.


_WITH_SCORES: Final = "eager"
STATE: Final = "output_attentions"


def why_not_use_attention(model: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return why a call cannot run with attention that keeps no scores; None if it can."""
    config: Any = getattr(model, "config", None)
    now = getattr(config, "_attn_implementation", None)
    family = str(getattr(config, "model_type", ""))
    if now != _WITH_SCORES:
        if now:
            return "its attention already keeps no scores"
        return "oomguard does not know its attention"
    if not hasattr(model, "set_attn_implementation"):
        return "this transformers cannot change a model's attention"
    if family not in _families():
        return f"models of the type {family} were not compared with other attention"
    return _why_scores_are_needed(model, arguments)


def _why_scores_are_needed(model: Any, arguments: Mapping[str, Any]) -> str | None:
    if arguments.get(STATE) or getattr(model.config, STATE, False):
        return f"{STATE} needs the scores"
    if getattr(arguments.get("attention_mask"), "ndim", _MASK_AXES) != _MASK_AXES:
        return "its attention_mask is made for eager attention"
    for module in model.modules():
        if module._forward_hooks and "attention" in type(module).__name__.lower():
            return "your hook on its attention may read the scores"
    return None


@contextlib.contextmanager
def use_attention(model: Any, implementation: str) -> Iterator[None]:
    """Run a model with this attention implementation in the block."""
    # The model's configuration is changed meanwhile, which calls in other threads would see.
    with ONE_CALL:
        before = {}
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            # Parts of a model may have configurations of their own.
            if hasattr(config, "_attn_implementation"):
                before[id(config)] = (config, config._attn_implementation)
        try:
            model.set_attn_implementation(implementation)
            yield
        finally:
            for config, was in before.values():
                config._attn_implementation = was


@functools.cache
def _families() -> frozenset[str]:
    return frozenset(_compared_models()["attention"]["model_types"])
