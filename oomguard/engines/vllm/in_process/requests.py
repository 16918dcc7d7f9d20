"""Keep an engine's unfinished requests, with their delivered tokens, and resume them.

If the engine core dies, a request continues behind the tokens that its caller has received: they
join its prompt. The next token may depend on more than that: penalties for generated tokens, a
grammar, the state of a seed. If numbers are exact, such a request is computed again from its
beginning, and delivered tokens are not delivered twice.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

# Nothing of vLLM is imported here: its request objects are used as they are.

# Sampling parameters whose meaning does not depend on where the prompt ends. These are limits
# that oomguard shortens, parameters of a single step or of the text, and the penalty that counts
# prompt and output alike.
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


def resume_request(
    asked: Any, tokens: Sequence[int], features: Mapping[str, Any], *, is_exact: bool
) -> tuple[Any, int]:
    """Return a request for the restarted engine, and how many delivered tokens it repeats.

    Args:
        asked: the request as the front end sent it.
        tokens: its delivered tokens.
        features: images and other media by hash, of those sent to the earlier core.
        is_exact: whether the same request gives the same tokens in another batch.
    """
    asked = _whole(asked, features)
    params = asked.sampling_params
    if not tokens or params is None:
        return asked, 0
    if repeats_tokens(asked, is_exact=is_exact):
        return asked, len(tokens)
    shorter = copy.copy(params)
    if params.max_tokens is not None:
        shorter.max_tokens = params.max_tokens - len(tokens)
    shorter.min_tokens = max(0, params.min_tokens - len(tokens))
    for name in _OF_PROMPT:  # these were delivered with the first token
        if hasattr(shorter, name):
            setattr(shorter, name, None)
    made = copy.copy(asked)
    made.prompt_token_ids = [*asked.prompt_token_ids, *tokens]
    made.sampling_params = shorter
    return made, 0


def repeats_tokens(asked: Any, *, is_exact: bool) -> bool:
    """Return whether a begun request is computed again from its beginning.

    It is if that gives the same tokens, or if nothing else is possible.
    """
    if follows_from_tokens(asked):
        return False
    must = _has_grammar(asked) or not _has_plain_prompt(asked)
    return must or (is_exact and _is_repeatable(asked.sampling_params))


def why_lost(
    asked: Any, done_tokens: int, features: Mapping[str, Any], *, is_session: bool
) -> str | None:
    """Return why a request cannot continue after a restart; None if it can."""
    if is_session:
        return "it was sent in several parts, and the engine that received them is gone"
    if any(
        one.data is None and one.mm_hash not in features
        for one in getattr(asked, "mm_features", None) or ()
    ):
        return "its image was sent with an earlier request, and the engine that received it is gone"
    params = asked.sampling_params
    if not done_tokens or params is None or _is_repeatable(params):
        return None
    if _has_grammar(asked) or not _has_plain_prompt(asked):
        return "it samples without a seed, so it cannot continue in the middle"
    return None


def follows_from_tokens(asked: Any) -> bool:
    """Return whether the next token depends on the earlier tokens only, and on no engine state."""
    params = asked.sampling_params
    if not _has_plain_prompt(asked) or (params.temperature and params.seed is not None):
        return False
    plain = type(params)()
    set_too = (
        name
        for name in type(params).__struct_fields__
        if name not in _OF_ONE_STEP and not name.startswith("_")
    )
    values = ((getattr(params, name), getattr(plain, name)) for name in set_too)
    return all(
        value == default or (_is_off(value) and _is_off(default)) for value, default in values
    )


def _is_off(value: Any) -> bool:
    """Return whether a parameter has no effect.

    The front end writes False or an empty list if the caller gave None.
    """
    return value is None or value is False or (isinstance(value, (list, dict, str)) and not value)


def _whole(asked: Any, features: Mapping[str, Any]) -> Any:
    """Return the request with the images that it left out because the earlier core had them."""
    own = getattr(asked, "mm_features", None)
    if not own or all(one.data is not None for one in own):
        return asked
    made = copy.copy(asked)
    made_features = []
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


# After so many deaths in whose last step it was, without a new token since, a request runs alone.
_SUSPECT_AFTER: Final = 2


@dataclass(slots=True)
class _Request:
    """One request; ``again`` is how many delivered tokens the engine still has to repeat."""

    asked: Any
    tokens: list[int] = field(default_factory=list)
    again: int = 0
    differs: bool = False
    is_session: bool = False
    deaths: int = 0
    deaths_alone: int = 0


class UnfinishedRequests:
    """The unfinished requests of one engine, in the order in which they came.

    Args:
        is_exact: whether the engine computes in float32. Only then does the same request give the
            same tokens in another batch.

    Attributes:
        progressed: whether a new token or result has come since the engine was last started.
    """

    def __init__(self, *, is_exact: bool = True) -> None:
        self._is_exact = is_exact
        self._requests: dict[str, _Request] = {}
        self._is_alone = False
        self._running: str | None = None
        self._suspects: list[str] = []
        self._held: list[str] = []
        self._vectors: dict[str, Any] = {}
        self._failed: set[str] = set()
        self.progressed = False

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, asked: Any) -> bool:
        """Add a request; return whether to send it now.

        While requests run one at a time, it waits.
        """
        name = asked.request_id
        is_session = name in self._requests or bool(getattr(asked, "resumable", False))
        self._requests[name] = _Request(asked, is_session=is_session)
        if not self.is_of_tokens(name):
            self._vectors[name] = None
        if self._is_alone:
            self._held.append(name)
        return not self._is_alone

    def drop(self, ids: Iterable[str]) -> None:
        """Forget requests that their callers aborted."""
        for name in ids:
            self._requests.pop(name, None)
            self._vectors.pop(name, None)

    def fail(self, name: str) -> None:
        """Forget a failed pooling request; ``vectors`` still returns the results of the others."""
        self._requests.pop(name)
        self._failed.add(name)

    def vectors(self) -> list[Any]:
        """Return the results of the pooling requests in their order; None without a result."""
        return list(self._vectors.values())

    def take(self, outputs: Any) -> Any:
        """Record what an engine's outputs deliver, and return them without repeated tokens."""
        outputs.outputs = [output for output in outputs.outputs if self._delivers(output)]
        if self._vectors and not self._requests and not self._failed:
            self._vectors.clear()  # their callers have received them
        return outputs

    def _delivers(self, output: Any) -> bool:
        found = self._requests.get(output.request_id)
        if found is None:
            return True
        had = len(output.new_token_ids)
        if found.again:
            _cut(found, output)
        if found.differs:
            return False
        found.tokens += output.new_token_ids
        if output.new_token_ids or output.finish_reason is not None:
            self.progressed = True
            found.deaths = 0
        if output.finish_reason is not None:
            del self._requests[output.request_id]
            if output.request_id in self._vectors:
                self._vectors[output.request_id] = output.pooling_output
            return True
        return bool(output.new_token_ids) or not had

    def differing(self) -> list[str]:
        """Return the requests whose repetition gave other tokens."""
        return [name for name, found in self._requests.items() if found.differs]

    def begin_again(self, *, alone: bool, suspects: Collection[str] = ()) -> list[Any]:
        """Return the requests to send to a restarted engine.

        Args:
            alone: whether requests run one at a time; ``next`` returns the following ones.
            suspects: the requests of the step in which the core died; empty if unknown, then all
                are suspects. The other requests wait for them.
        """
        self.progressed = False
        named = [name for name in self._requests if name in suspects]
        for name in named:
            self._requests[name].deaths += 1
        again = [name for name in named if self._requests[name].deaths >= _SUSPECT_AFTER]
        if self._is_alone:
            earlier = [name for name in self._suspects if name in self._requests]
        else:
            earlier = []
        is_found = self._is_alone and self._running not in self._requests
        self._running = None
        if is_found or (self._is_alone and not named):
            # One suspect of an earlier round is settled; the others have not been tried yet.
            self._suspects = earlier
        elif alone:
            self._suspects = named or list(self._requests)
        else:
            self._suspects = again
        self._is_alone = bool(self._suspects)
        if not self._is_alone:
            return [self._resumed(name) for name in self._requests]
        self._held = [name for name in self._requests if name not in self._suspects]
        return self.next()

    def next(self) -> list[Any]:
        """Return the requests to send now if they run one at a time; none while one runs."""
        if not self._is_alone or self._running in self._requests:
            return []
        while self._suspects:
            self._running = self._suspects.pop(0)
            if self._running in self._requests:
                return [self._resumed(self._running)]
        self._is_alone = False
        held = self._held
        self._held = []
        return [self._resumed(name) for name in held if name in self._requests]

    def lost(self, *, most_tokens: int | None = None) -> dict[str, str]:
        """Return the requests that cannot continue, each with the reason.

        ``most_tokens`` is the restarted engine's limit for one request; None if it is unknown.
        """
        known = self._features()
        found = {}
        for name, one in self._requests.items():
            why = why_lost(one.asked, len(one.tokens), known, is_session=one.is_session)
            length = len(one.asked.prompt_token_ids or ()) + len(one.tokens)
            if why is None and most_tokens is not None and length >= most_tokens:
                why = f"it has {length} tokens, but the restarted engine allows only {most_tokens}"
            if why is not None:
                found[name] = why
        return found

    def at_fault(self, most: int) -> str | None:
        """Return the request that ran alone in the ``most``-th death; None without one."""
        found = None
        if self._is_alone:
            found = self._requests.get(self._running or "")
        if found is None:
            return None
        found.deaths_alone += 1
        if found.deaths_alone >= most:
            return self._running
        return None

    def is_of_tokens(self, name: str) -> bool:
        """Return whether a request generates text; a pooling request cannot report its failure."""
        return self._requests[name].asked.sampling_params is not None

    def _features(self) -> dict[str, Any]:
        """Return the media of unfinished requests by hash; an engine receives each only once."""
        features = (
            one
            for found in self._requests.values()
            for one in getattr(found.asked, "mm_features", None) or ()
        )
        return {one.mm_hash: one.data for one in features if one.data is not None}

    def _resumed(self, name: str) -> Any:
        found = self._requests[name]
        asked, found.again = resume_request(
            found.asked, found.tokens, self._features(), is_exact=self._is_exact
        )
        return asked


def _cut(found: _Request, output: Any) -> None:
    """Remove repeated tokens from an output."""
    new = output.new_token_ids
    known = len(found.tokens) - found.again
    cut = min(found.again, len(new))
    found.differs = found.differs or list(new[:cut]) != found.tokens[known : known + cut]
    is_short = output.finish_reason is not None and cut < found.again
    found.differs = found.differs or is_short
    found.again -= cut
    output.new_token_ids = new[cut:]
    output.new_prompt_logprobs_tensors = None
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(cut, len(new) - cut)
