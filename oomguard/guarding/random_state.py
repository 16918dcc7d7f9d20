"""Where torch's generators stood when a call began, and whether a call may begin in parts: it may
have to be run again, whole.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

# What the user gives to a call that changes as it runs, and cannot be put back.
_FILLED: Final = (
    "cache",
    "past_key_values",
    "cache_params",
    "streamer",
    "prefix_allowed_tokens_fn",
)
_LISTS: Final = ("logits_processor", "stopping_criteria")


@dataclass(frozen=True, slots=True)
class Generators:
    """Where torch's generators stood, by the kind of device; empty where torch is not loaded."""

    states: Mapping[str, Any]

    @classmethod
    def now(cls) -> Generators:
        """Note it for the CPU, and for CUDA devices where they are in use."""
        torch = sys.modules.get("torch")
        if torch is None:
            return cls({})
        states: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
        return cls(states)

    def put_back(self) -> None:
        """Put the generators back to where they stood."""
        torch = sys.modules.get("torch")
        if torch is None or not self.states:
            return
        torch.set_rng_state(self.states["cpu"])
        if "cuda" in self.states:
            torch.cuda.set_rng_state_all(self.states["cuda"])


def may_begin_in_parts(arguments: Mapping[str, Any], puts_back: Collection[str] = ()) -> bool:
    """Return whether a call may be run whole after parts of it ran: nothing of the user's in it may
    have changed by then.

    ``puts_back`` are those of its arguments that the call itself puts back.
    """
    if any(arguments.get(name) is not None for name in _FILLED if name not in puts_back):
        return False
    own = [entry for name in _LISTS for entry in _entries(arguments.get(name))]
    return all(type(entry).__module__.partition(".")[0] == "transformers" for entry in own)


def _entries(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if value is None:
        return []
    return [value]
