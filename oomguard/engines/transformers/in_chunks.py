"""``generate`` with its prompt processed some tokens at a time: the same tokens, and activations of one chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

# What has to be off, by the option's name: another way of the same, or states of the prompt that are wanted whole.
_NOT_WITH: Final = (
    "prefill_chunk_size",
    "output_hidden_states",
    "output_attentions",
    "assistant_model",
    "prompt_lookup_num_tokens",
)
_NO_PROMPT: Final = ("inputs_embeds", "encoder_outputs", "custom_generate")
# The function of transformers that processes a prompt: of a call that fails there no token has come out.
_PREFILL: Final = "_prefill"


def why_not_in_chunks(
    model: Any, arguments: Mapping[str, Any], option: Callable[[str], Any], failed_in: Iterable[str] | None
) -> str | None:
    """Return why a call's prompt cannot be processed in chunks; None where it can.

    Args:
        model: the model.
        arguments: the call's.
        option: returns an option of the call by its name.
        failed_in: the functions that its failure went through; None: it has not been run.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", True) or not hasattr(
        getattr(model, "generation_config", None), "prefill_chunk_size"
    ):
        return "the model processes no prompt in chunks"
    if option("use_cache") is False:
        return "a prompt in chunks needs the cache, and use_cache is off"
    for name in (*_NOT_WITH, *_NO_PROMPT):
        if arguments.get(name) is not None or (name in _NOT_WITH and option(name)):
            return f"a prompt in chunks does not go with {name}"
    if arguments.get("streamer") is not None and failed_in is not None and _PREFILL not in failed_in:
        return "the streamer has had tokens already"
    return None


class AfterPrompt:
    """A streamer that has had the prompt: it is not given again."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._had_prompt = streamer, True

    def put(self, value: Any) -> None:
        """Pass tokens on, but not the first ones."""
        if self._had_prompt:
            self._had_prompt = False
        else:
            self._streamer.put(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streamer, name)
