"""``generate`` with less of its prompt: what each row reads of it, and the whole prompt before the new tokens again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oomguard.engines.transformers.inputs import inputs_of
from oomguard.engines.transformers.media import Media
from oomguard.engines.transformers.step_functions import NAMES
from oomguard.facts import FactValue
from oomguard.observe import torch_memory

if TYPE_CHECKING:
    from oomguard.engines.transformers.generate import GenerateCall

# Arguments with one entry a token of the prompt, cut as it is.
_ALONG_PROMPT: Final = ("attention_mask", "token_type_ids")
# Arguments that belong to the whole prompt, or read it.
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
    """Return a call whose rows read ``tokens`` tokens of their prompt, or why it cannot be made so.

    A decoder keeps the last ones, as vLLM's ``truncate_prompt_tokens`` does; an encoder the first, as a tokenizer's
    ``truncation=True`` does.
    """
    kept, whole = int(tokens), call.prompt_tokens
    if (why_not := _why_not(call)) is not None:
        return why_not
    if whole is None or whole <= kept:
        return f"the prompt has no more than {kept} tokens"
    encodes = _encodes(call)
    part = slice(0, kept) if encodes else slice(whole - kept, whole)

    def cut(value: Any) -> Any:
        return value[:, part] if getattr(value, "shape", ())[1:2] == (whole,) else value

    named = ("inputs", "input_ids", *_ALONG_PROMPT)
    with torch_memory.on_host():  # views take nothing, also of a simulated device that is full
        args = (cut(call.args[0]), *call.args[1:]) if call.args else ()
        kwargs = {name: cut(value) if name in named else value for name, value in call.kwargs.items()}
        whole_prompt = inputs_of(call.model, call.args, call.kwargs)
        prompt = None if encodes else whole_prompt[:, : whole - kept]
    if not encodes:  # a length in all counts the prompt
        kwargs.pop("max_length", None)
        kwargs["max_new_tokens"] = call.max_new_tokens
    return replace(call, args=args, kwargs=kwargs, prompt_tokens=kept, left_out=prompt)


def with_left_out(left_out: Any, tokens: Any, start: int, stop: int) -> Any:
    """Return the tokens of rows ``start`` to ``stop`` behind what was left out of their prompts; each may have several."""
    import torch

    before = left_out[start:stop].to(tokens.device)
    return torch.cat([before.repeat_interleave(len(tokens) // len(before), dim=0), tokens], dim=1)


def _why_not(call: GenerateCall) -> str | None:
    """Return why the prompt stays as it is, None where it may be cut."""
    import torch

    if not isinstance(inputs_of(call.model, call.args, call.kwargs), torch.Tensor) or call.max_new_tokens is None:
        return "the tokens of the prompt are not known"
    given: Mapping[str, Any] = call.kwargs
    for name in _OF_WHOLE_PROMPT:
        if given.get(name) is not None and given[name] != []:
            return f"the argument {name} belongs to the whole prompt"
    if call.weigh is not None:
        return "the record of fields holds what the whole prompt gives"
    if call.option("min_length") and not _encodes(call):
        return "min_length counts the prompt"
    if call.media() != Media({}):
        return "what stands beside the text has its place in the prompt"
    return None


def _encodes(call: GenerateCall) -> bool:
    return bool(getattr(getattr(call.model, "config", None), "is_encoder_decoder", False))
