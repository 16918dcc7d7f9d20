"""The requests of an engine that are not finished: what was asked, the tokens that were delivered,
and how each goes on.

When an engine dies, a request goes on behind the tokens that its caller has had: they join its
prompt. Where what comes next depends on more than the tokens before it (penalties of what was
generated, a grammar, the state of a seed) and numbers are exact, the request is computed once more,
and what was delivered is not delivered again. resuming.py says which.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

# How one request goes on in an engine that was made again. Nothing of vLLM is imported: its
# requests are used as they are.

# Sampling parameters that mean the same whichever of the tokens are prompt: limits that are
# shortened, what acts on one step or on the text, and the penalty that counts prompt and output
# alike.
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


def resumed(
    asked: Any, tokens: Sequence[int], features: Mapping[str, Any], *, is_exact: bool
) -> tuple[Any, int]:
    """Return a request as it is sent to an engine that was made again, and how many delivered
    tokens it computes once more.

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
    """Return whether a request that has begun is computed once more: where that gives the same
    tokens, or nothing else is possible.
    """
    if follows_from_tokens(asked):
        return False
    must = _has_grammar(asked) or not _has_plain_prompt(asked)
    return must or (is_exact and _is_repeatable(asked.sampling_params))


def why_lost(
    asked: Any, done_tokens: int, features: Mapping[str, Any], *, is_session: bool
) -> str | None:
    """Return why a request cannot go on in an engine that was made again, None where it can."""
    if is_session:
        return "its parts were sent one after the other, and the engine that had them is gone"
    if any(
        one.data is None and one.mm_hash not in features
        for one in getattr(asked, "mm_features", None) or ()
    ):
        return (
            "an image of it had been sent with an earlier request, and the engine that had it is "
            "gone"
        )
    params = asked.sampling_params
    if not done_tokens or params is None or _is_repeatable(params):
        return None
    if _has_grammar(asked) or not _has_plain_prompt(asked):
        return "it is drawn without a seed, and cannot go on in the middle"
    return None


def follows_from_tokens(asked: Any) -> bool:
    """Return whether what a request generates next follows from the tokens before it, and from
    nothing that an engine keeps.
    """
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
    """Whether a parameter asks for nothing: the front end writes False or an empty list where None
    was.
    """
    return value is None or value is False or (isinstance(value, (list, dict, str)) and not value)


def _whole(asked: Any, features: Mapping[str, Any]) -> Any:
    """Return the request with the images that it left out, because the engine before knew them."""
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


# Deaths in whose last step a request was, without a token of its own since: then it runs alone,
# whatever else goes on.
_SUSPECT_AFTER: Final = 2


@dataclass(slots=True)
class _Request:
    """One request; ``again`` is how many delivered tokens the engine still computes once more."""

    asked: Any
    tokens: list[int] = field(default_factory=list)
    again: int = 0
    differs: bool = False
    is_session: bool = False
    deaths: int = 0
    deaths_alone: int = 0


class Unfinished:
    """The unfinished requests of one engine, in the order in which they came.

    Args:
        is_exact: whether the engine computes in float32: only there the same request gives the same
            tokens in another batch.

    Attributes:
        progressed: whether a token or a result that is new has come since the engine was made or
            made again.
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
        """Take a request; return whether it is to be sent now. It is not while requests run one at
        a time.
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
        """Forget requests that their caller has given up."""
        for name in ids:
            self._requests.pop(name, None)
            self._vectors.pop(name, None)

    def fail(self, name: str) -> None:
        """Forget a request for a vector that failed; what the others gave is kept until it is told
        (``vectors``).
        """
        self._requests.pop(name)
        self._failed.add(name)

    def vectors(self) -> list[Any]:
        """Return what each request for a vector gave, in the order in which they came; None for one
        that gave none.
        """
        return list(self._vectors.values())

    def take(self, outputs: Any) -> Any:
        """Note what an engine's outputs deliver, and remove from them what was delivered before;
        return them.
        """
        outputs.outputs = [output for output in outputs.outputs if self._delivers(output)]
        if self._vectors and not self._requests and not self._failed:
            self._vectors.clear()  # their callers have them
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
        """Return the requests that gave other tokens when they were computed once more."""
        return [name for name, found in self._requests.items() if found.differs]

    def begin_again(self, *, alone: bool, suspects: Collection[str] = ()) -> list[Any]:
        """Return the requests to send to an engine that was made again.

        Args:
            alone: whether requests run one at a time, and each other when the last has finished
                (``next``).
            suspects: those of the step at which the engine died; all of them where none is known.
                The rest waits for them.
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
            # of those that were suspected before one is settled: the others are still to be tried
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
        """Return the requests whose turn it is where they run one at a time: none while another one
        runs.
        """
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
        """Return the requests that cannot go on, and why; ``most_tokens`` is the longest request of
        the engine that was made again.
        """
        known = self._features()
        found = {}
        for name, one in self._requests.items():
            why = why_lost(one.asked, len(one.tokens), known, is_session=one.is_session)
            length = len(one.asked.prompt_token_ids or ()) + len(one.tokens)
            if why is None and most_tokens is not None and length >= most_tokens:
                why = (
                    f"it has {length} tokens, and the engine that was made again takes "
                    f"{most_tokens}"
                )
            if why is not None:
                found[name] = why
        return found

    def at_fault(self, most: int) -> str | None:
        """Return the request that ran alone when the engine died, the ``most``-th time; None where
        none did.
        """
        if self._is_alone:
            found = self._requests.get(self._running or "")
        else:
            found = None
        if found is None:
            return None
        found.deaths_alone += 1
        if found.deaths_alone >= most:
            return self._running
        return None

    def is_of_tokens(self, name: str) -> bool:
        """Return whether a request generates: one for a vector or a score has no way to tell that
        it failed.
        """
        return self._requests[name].asked.sampling_params is not None

    def _features(self) -> dict[str, Any]:
        """Return the images and the like that unfinished requests carry, by hash: what an engine
        knows is not sent twice.
        """
        features = (
            one
            for found in self._requests.values()
            for one in getattr(found.asked, "mm_features", None) or ()
        )
        return {one.mm_hash: one.data for one in features if one.data is not None}

    def _resumed(self, name: str) -> Any:
        found = self._requests[name]
        asked, found.again = resumed(
            found.asked, found.tokens, self._features(), is_exact=self._is_exact
        )
        return asked


def _cut(found: _Request, output: Any) -> None:
    """Cut what was delivered before out of an output."""
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
