"""A failed call with one thing of it done another way: whether it may be, and what it would need."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from oomguard.engines.protocol import WatchedCall
from oomguard.facts import FactValue
from oomguard.guarding.frames import frames_of
from oomguard.incident import Effect, Patch
from oomguard.remedy.cache_elsewhere import CACHE, CACHES
from oomguard.remedy.call_variants import VARIED, WITHOUT_SCORES
from oomguard.remedy.prompt_chunks import CHUNK, SMALLEST_TOKENS
from oomguard.remedy.variant import Variant
from oomguard.settings import effect_of

if TYPE_CHECKING:
    from oomguard.memory.generate.rows import CallTrace

# What is asked of a call to learn whether a setting of it may have another value at all: one of these.
_LEAST: Mapping[str, tuple[FactValue, ...]] = {
    "attn_implementation": (WITHOUT_SCORES,),
    CHUNK: (SMALLEST_TOKENS,),
    CACHE: CACHES,
}
_TOLD: Mapping[str, tuple[str, str]] = {
    "attn_implementation": ("running attention without its scores", "attention"),
    CHUNK: ("processing the prompt in chunks", "tokens"),
    CACHE: ("keeping the cache another way", "cache"),
    "max_new_tokens": ("cutting the answers", "tokens"),
    "truncate_prompt_tokens": ("cutting the prompts", "tokens"),
}


class Variation:
    """A call as it runs now: as it was made, or with some of its settings changed.

    Attributes:
        made: the call as it was made.
        call: the call as it runs.
        settings: what differs.
    """

    def __init__(self, made: WatchedCall) -> None:
        self.made = self.call = made
        self.settings: dict[str, FactValue] = {}
        self._failed_in: frozenset[str] | None = None
        self._refused: dict[str, str] = {}

    def failed(self, error: BaseException) -> None:
        """Note where it failed; what holds for a call that runs again holds for each of its failures."""
        functions = frozenset(frame.f_code.co_name for frame in frames_of(error))
        self._failed_in = functions if self._failed_in is None else self._failed_in & functions

    def vary(self, setting: str, value: FactValue) -> None:
        """Change one more setting, where that can be done."""
        changed = self.made.varied({**self.settings, setting: value}, self._failed_in)
        if isinstance(changed, str):
            self._refused[setting] = changed
        else:
            self.call, self.settings[setting] = changed, value

    @property
    def lasting(self) -> dict[str, FactValue]:
        """What later calls may begin with: what changes no output."""
        return {n: v for n, v in self.settings.items() if effect_of(n, None, v) is Effect.OUTPUT_PRESERVING}

    def take_back(self, why: str) -> dict[str, FactValue]:
        """Go back to the call as it was made, since changed it gives no result that may stand for it; return what was changed."""
        self._refused.update(dict.fromkeys(self.settings, f"with it: {why}"))
        changed, self.call, self.settings = self.settings, self.made, {}
        return changed

    def variants(self) -> dict[str, Variant]:
        """Return what may be done another way after a failure; empty where the call has no prompt of known length."""
        if self.made.prompt_tokens is None:
            return {}
        own = {CHUNK: self.made.prompt_tokens, "max_new_tokens": self.made.max_new_tokens}
        now = {**own, "truncate_prompt_tokens": self.made.prompt_tokens, **self.settings}
        return {name: self._variant(name, now.get(name)) for name in VARIED}

    def _variant(
        self, name: str, now: FactValue | None, also: Mapping[str, FactValue] = MappingProxyType({})
    ) -> Variant:
        def changed(value: FactValue) -> WatchedCall | str:
            return self.made.varied({**self.settings, **also, name: value}, self._failed_in)

        def why_not_value(value: FactValue) -> str | None:
            found = changed(value)
            return found if isinstance(found, str) else None

        @functools.cache  # several remedies ask the same, and a trace takes seconds
        def trace(value: FactValue) -> CallTrace | None:
            call = changed(value)
            return None if isinstance(call, str) else call.traced()

        @functools.cache
        def need_bytes(value: FactValue, rows: int, room_bytes: int) -> int | None:
            traced = trace(value)
            return None if traced is None else traced.need_bytes(rows, room_bytes)

        values = _LEAST.get(name) or (_least_tokens(now, changed),)
        refused = [self._refused.get(name) or why_not_value(value) for value in values]
        least = next((value for value, why in zip(values, refused, strict=True) if why is None), values[0])
        return Variant(
            now,
            need_bytes,
            None if None in refused else refused[0],
            least,
            why_not_value,
            lambda other, value: self._variant(name, now, {**also, other: value}),
        )


def _least_tokens(now: FactValue | None, changed: Callable[[FactValue], WatchedCall | str]) -> int:
    """Return the fewest new tokens with which a call can be made: others are refused."""
    low, high = 1, max(1, int(now or 1) - 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if isinstance(changed(middle), str) else (low, middle)
    return low


def tell_of(patch: Patch, kind: str | None, done: int) -> None:
    """Log what changes, and after how many rows."""
    from oomguard.log import get_logger

    if patch.setting in _TOLD:
        what, name = _TOLD[patch.setting]
        get_logger().warning(what, **{name: patch.new}, kind=kind, done=done)
    else:
        get_logger().warning("splitting the batch", rows=f"{patch.old} -> {patch.new}", kind=kind, done=done)
