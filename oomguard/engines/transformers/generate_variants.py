"""Run ``generate`` as a variant: chunked prefill, other attention or cache, fewer tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.facts import FactValue
from oomguard.engines.transformers.attention import STATE as _SCORES
from oomguard.engines.transformers.attention import use_attention, why_not_use_attention
from oomguard.engines.transformers.call_state import EARLY_EXIT
from oomguard.engines.transformers.chunked_forward import has_leading_padding
from oomguard.engines.transformers.chunked_forward import (
    why_not_in_chunks as why_no_forward_in_chunks,
)
from oomguard.engines.transformers.independence import NAMES, why_not_separate
from oomguard.engines.transformers.inputs import given_cache, main_input, why_packed
from oomguard.engines.transformers.kv_cache_offload import cache_on_host, with_cache_placement
from oomguard.engines.transformers.media import Media
from oomguard.probe import torch_memory

if TYPE_CHECKING:
    from oomguard.engines.transformers.generate import GenerateCall


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
    *NAMES,
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
    with torch_memory.on_host():  # views need no memory, even on a full simulated device
        if call.args:
            args = (cut(call.args[0]), *call.args[1:])
        else:
            args = ()
        kwargs = {
            name: cut(value) if name in named else value for name, value in call.kwargs.items()
        }
        whole_prompt = main_input(call.model, call.args, call.kwargs)
        if encodes:
            prompt = None
        else:
            prompt = whole_prompt[:, : whole - kept]
    if not encodes:  # max_length includes the prompt
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
    kept = {name: value for name, value in call.kwargs.items() if name != "max_length"}
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
