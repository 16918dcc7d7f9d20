"""How one request goes on in an engine that was made again. Nothing of vLLM is imported: its requests are used as they are."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

# Sampling parameters that mean the same whichever of the tokens are prompt: limits that are shortened, what acts on one step or on
# the text, and the penalty that counts prompt and output alike.
_OF_ONE_STEP: Final = frozenset(
    {
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "logprob_token_ids",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
        "logit_bias",
        "allowed_token_ids",
        "seed",
        "repetition_penalty",
    }
)
_OF_PROMPT: Final = ("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start")


def resumed(asked: Any, tokens: Sequence[int], features: Mapping[str, Any], *, is_exact: bool) -> tuple[Any, int]:
    """Return a request as it is sent to an engine that was made again, and how many delivered tokens it computes once more.

    Args:
        asked: the request as it was asked.
        tokens: what was delivered of it.
        features: images and the like by hash, for those that the engine before had been sent.
        is_exact: whether the same request gives the same tokens in another batch.
    """
    asked = _whole(asked, features)
    params = asked.sampling_params
    if not tokens or params is None:
        return asked, 0
    if computes_again(asked, is_exact=is_exact):
        return asked, len(tokens)
    shorter = copy.copy(params)
    if params.max_tokens is not None:
        shorter.max_tokens = params.max_tokens - len(tokens)
    shorter.min_tokens = max(0, params.min_tokens - len(tokens))
    for name in _OF_PROMPT:  # delivered with the first token
        if hasattr(shorter, name):
            setattr(shorter, name, None)
    made = copy.copy(asked)
    made.prompt_token_ids = [*asked.prompt_token_ids, *tokens]
    made.sampling_params = shorter
    return made, 0


def computes_again(asked: Any, *, is_exact: bool) -> bool:
    """Return whether a request that has begun is computed once more: where that gives the same tokens, or nothing else is possible."""
    if follows_from_tokens(asked):
        return False
    must = _has_grammar(asked) or not _has_plain_prompt(asked)
    return must or (is_exact and _is_repeatable(asked.sampling_params))


def why_lost(asked: Any, done_tokens: int, features: Mapping[str, Any], *, is_session: bool) -> str | None:
    """Return why a request cannot go on in an engine that was made again, None where it can."""
    if is_session:
        return "its parts were sent one after the other, and the engine that had them is gone"
    if any(one.data is None and one.mm_hash not in features for one in getattr(asked, "mm_features", None) or ()):
        return "an image of it had been sent with an earlier request, and the engine that had it is gone"
    params = asked.sampling_params
    if not done_tokens or params is None or _is_repeatable(params):
        return None
    if _has_grammar(asked) or not _has_plain_prompt(asked):
        return "it is drawn without a seed, and cannot go on in the middle"
    return None


def follows_from_tokens(asked: Any) -> bool:
    """Return whether what a request generates next follows from the tokens before it, and from nothing that an engine keeps."""
    params = asked.sampling_params
    if not _has_plain_prompt(asked) or (params.temperature and params.seed is not None):
        return False
    plain = type(params)()
    set_too = (name for name in type(params).__struct_fields__ if name not in _OF_ONE_STEP and not name.startswith("_"))
    values = ((getattr(params, name), getattr(plain, name)) for name in set_too)
    return all(value == default or (_is_off(value) and _is_off(default)) for value, default in values)


def _is_off(value: Any) -> bool:
    """Whether a parameter asks for nothing: the front end writes False or an empty list where None was."""
    return value is None or value is False or (isinstance(value, (list, dict, str)) and not value)


def _whole(asked: Any, features: Mapping[str, Any]) -> Any:
    """Return the request with the images that it left out, because the engine before knew them."""
    own = getattr(asked, "mm_features", None)
    if not own or all(one.data is not None for one in own):
        return asked
    made, made_features = copy.copy(asked), []
    for one in own:
        filled = copy.copy(one)
        if filled.data is None:
            filled.data = features[filled.mm_hash]
        made_features.append(filled)
    made.mm_features = made_features
    return made


def _has_grammar(asked: Any) -> bool:
    return getattr(asked.sampling_params, "structured_outputs", None) is not None


def _is_repeatable(params: Any) -> bool:
    return not params.temperature or params.seed is not None


def _has_plain_prompt(asked: Any) -> bool:
    return asked.prompt_token_ids is not None and getattr(asked, "prompt_embeds", None) is None
