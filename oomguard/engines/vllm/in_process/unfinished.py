"""The requests of an engine that are not finished: what was asked, the tokens that were delivered, and how each goes on.

When an engine dies, a request goes on behind the tokens that its caller has had: they join its prompt. Where what comes next depends
on more than the tokens before it (penalties of what was generated, a grammar, the state of a seed) the request is computed once more,
and what was delivered is not delivered again. Nothing of vLLM is imported: its requests and outputs are used as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

# Sampling parameters that mean the same whichever of the tokens are prompt: limits that are shortened, and what acts on one step,
# or on the text. With any other one that is set, what comes next depends on what the engine has kept.
_OF_ONE_STEP: Final = frozenset(
    {
        "n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens",
        "logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs",
        "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind",
        "stream_interval", "skip_clone", "output_text_buffer_length", "logit_bias", "allowed_token_ids", "seed",
    }
)  # fmt: skip
_OF_PROMPT: Final = {"prompt_logprobs": None, "prompt_logprob_token_ids": None, "prompt_logprob_start": None}


@dataclass(slots=True)
class _Request:
    """One request; ``again`` is how many delivered tokens the engine still computes once more."""

    asked: Any
    tokens: list[int] = field(default_factory=list)
    again: int = 0
    deaths_alone: int = 0


class Unfinished:
    """The unfinished requests of one engine, in the order in which they came.

    Attributes:
        progressed: whether a token or a result has come since the engine was made or made again.
        differing: how many requests gave other tokens when they were computed once more.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._is_alone = False
        self._running: str | None = None
        self._suspects: list[str] = []
        self._held: list[str] = []
        self.progressed = False
        self.differing = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, asked: Any) -> bool:
        """Take a request; return whether it is to be sent now. It is not while requests run one at a time."""
        self._requests[asked.request_id] = _Request(asked)
        if self._is_alone:
            self._held.append(asked.request_id)
        return not self._is_alone

    def drop(self, ids: Iterable[str]) -> None:
        """Forget requests that their caller has given up."""
        for name in ids:
            self._requests.pop(name, None)

    def take(self, outputs: Any) -> Any:
        """Note what an engine's outputs deliver, and remove from them what was delivered before; return them."""
        outputs.outputs = [output for output in outputs.outputs if self._delivers(output)]
        return outputs

    def _delivers(self, output: Any) -> bool:
        found = self._requests.get(output.request_id)
        if found is None:
            return True
        new = output.new_token_ids
        if found.again:
            self._take_again(found, output)
        found.tokens += output.new_token_ids
        self.progressed = True
        if output.finish_reason is not None:
            del self._requests[output.request_id]
            return True
        return bool(output.new_token_ids) or not new

    def _take_again(self, found: _Request, output: Any) -> None:
        """Cut what was delivered before out of an output."""
        new = output.new_token_ids
        known, cut = len(found.tokens) - found.again, min(found.again, len(new))
        if list(new[:cut]) != found.tokens[known : known + cut]:
            self.differing += 1
        found.again -= cut
        output.new_token_ids = new[cut:]
        output.new_prompt_logprobs_tensors = None
        if output.new_logprobs is not None:
            output.new_logprobs = output.new_logprobs.slice_request(cut, len(new) - cut)

    def begin_again(self, *, alone: bool, suspects: Collection[str] = ()) -> list[Any]:
        """Return the requests to send to an engine that was made again.

        Args:
            alone: whether they run one at a time, and each other when the last has finished (``next``).
            suspects: those which do; all of them where none is known. The rest waits for them.
        """
        self.progressed = False
        self._is_alone, self._running = alone, None
        if not alone:
            return [self._resumed(found) for found in self._requests.values()]
        self._suspects = [name for name in self._requests if name in suspects] or list(self._requests)
        self._held = [name for name in self._requests if name not in self._suspects]
        return self.next()

    def next(self) -> list[Any]:
        """Return the requests whose turn it is where they run one at a time: none while another one runs."""
        if not self._is_alone or self._running in self._requests:
            return []
        while self._suspects:
            self._running = self._suspects.pop(0)
            if self._running in self._requests:
                return [self._resumed(self._requests[self._running])]
        self._is_alone, held, self._held = False, self._held, []
        return [self._resumed(self._requests[name]) for name in held if name in self._requests]

    def lost(self) -> list[str]:
        """Return the requests that can neither go on nor be computed once more: drawn without a seed, within a grammar."""
        return [
            name
            for name, found in self._requests.items()
            if found.tokens and found.asked.sampling_params is not None and not _may_be_resumed(found.asked)
        ]

    def at_fault(self, most: int) -> str | None:
        """Return the request that ran alone when the engine died, the ``most``-th time; None where none did."""
        found = self._requests.get(self._running or "") if self._is_alone else None
        if found is None:
            return None
        found.deaths_alone += 1
        return self._running if found.deaths_alone >= most else None

    def _resumed(self, found: _Request) -> Any:
        """Return the request as it is sent to an engine that was made again."""
        asked, params = found.asked, found.asked.sampling_params
        found.again = 0
        if not found.tokens or params is None:
            return asked
        if not follows_from_tokens(asked) and _is_repeatable(params):
            found.again = len(found.tokens)
            return asked
        shorter = copy.copy(params)
        if params.max_tokens is not None:
            shorter.max_tokens = params.max_tokens - len(found.tokens)
        shorter.min_tokens = max(0, params.min_tokens - len(found.tokens))
        for name, none in _OF_PROMPT.items():  # delivered with the first token
            if hasattr(shorter, name):
                setattr(shorter, name, none)
        resumed = copy.copy(asked)
        resumed.prompt_token_ids = [*asked.prompt_token_ids, *found.tokens]
        resumed.sampling_params = shorter
        return resumed


def follows_from_tokens(asked: Any) -> bool:
    """Return whether what a request generates next follows from the tokens before it, and from nothing that an engine keeps."""
    params = asked.sampling_params
    if not _has_plain_prompt(asked):
        return False
    if params.temperature and params.seed is not None:
        return False
    plain = type(params)()
    set_too = (name for name in type(params).__struct_fields__ if name not in _OF_ONE_STEP and not name.startswith("_"))
    return all(getattr(params, name) == getattr(plain, name) for name in set_too)


def _may_be_resumed(asked: Any) -> bool:
    params = asked.sampling_params
    goes_on = _has_plain_prompt(asked) and getattr(params, "structured_outputs", None) is None
    return _is_repeatable(params) or goes_on


def _is_repeatable(params: Any) -> bool:
    return not params.temperature or params.seed is not None


def _has_plain_prompt(asked: Any) -> bool:
    has_rows = getattr(asked, "prompt_embeds", None) is not None
    return asked.prompt_token_ids is not None and not has_rows and not getattr(asked, "resumable", False)
