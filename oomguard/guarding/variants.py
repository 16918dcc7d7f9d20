"""A failed call with one thing of it done another way: whether it may be, and what it would need."""

from __future__ import annotations

from collections.abc import Mapping

from oomguard.engines.protocol import WatchedCall
from oomguard.facts import FactValue
from oomguard.guarding.frames import frames_of
from oomguard.incident import Effect, Patch
from oomguard.remedy.call_variants import VARIED, WITHOUT_SCORES
from oomguard.remedy.prompt_chunks import SMALLEST_TOKENS
from oomguard.remedy.variant import Variant
from oomguard.settings import effect_of

CHUNK = "prefill_chunk_size"
# What is asked of a call to learn whether a setting of it may have another value at all.
_LEAST: Mapping[str, FactValue] = {
    "attn_implementation": WITHOUT_SCORES,
    CHUNK: SMALLEST_TOKENS,
    "max_new_tokens": 1,
}
_TOLD: Mapping[str, tuple[str, str]] = {
    "attn_implementation": ("running attention without its scores", "attention"),
    CHUNK: ("processing the prompt in chunks", "tokens"),
    "max_new_tokens": ("cutting the answers", "tokens"),
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
        self._refused: dict[str, str] = {}

    def vary(self, setting: str, value: FactValue, error: BaseException | None) -> None:
        """Change one more setting, where that can be done; ``error`` is the call's first failure, None before it has run."""
        changed = self.made.varied({**self.settings, setting: value}, functions_of(error))
        if isinstance(changed, str):
            self._refused[setting] = changed
        else:
            self.call, self.settings[setting] = changed, value

    @property
    def lasting(self) -> dict[str, FactValue]:
        """What later calls may begin with: what changes no output."""
        return {n: v for n, v in self.settings.items() if effect_of(n, None, v) is Effect.OUTPUT_PRESERVING}

    def take_back(self, why: str) -> dict[str, FactValue]:
        """Run the call as it was made again, since so changed it gives no such result; return what was changed."""
        self._refused.update(dict.fromkeys(self.settings, f"it gave no such result so: {why}"))
        changed, self.call, self.settings = self.settings, self.made, {}
        return changed

    def variants(self, error: BaseException | None) -> dict[str, Variant]:
        """Return what may be done another way after a failure; empty where the call has no prompt of known length."""
        if self.made.prompt_tokens is None:
            return {}
        now = {CHUNK: self.made.prompt_tokens, "max_new_tokens": self.made.max_new_tokens, **self.settings}
        return {name: self._variant(name, now.get(name), functions_of(error)) for name in VARIED}

    def _variant(self, name: str, now: FactValue | None, failed_in: frozenset[str]) -> Variant:
        def changed(value: FactValue) -> WatchedCall | str:
            return self.made.varied({**self.settings, name: value}, failed_in)

        def need_bytes(value: FactValue, rows: int, room_bytes: int) -> int | None:
            call = changed(value)
            traced = None if isinstance(call, str) else call.traced()
            return None if traced is None else traced.need_bytes(rows, room_bytes)

        asked = self._refused.get(name) or changed(_LEAST[name])
        return Variant(now, need_bytes, asked if isinstance(asked, str) else None)


def functions_of(error: BaseException | None) -> frozenset[str]:
    """Return the names of the functions that a failure went through."""
    return frozenset() if error is None else frozenset(frame.f_code.co_name for frame in frames_of(error))


def tell_of(patch: Patch, kind: str | None, done: int) -> None:
    """Log what changes, and after how many rows."""
    from oomguard.log import get_logger

    if patch.setting in _TOLD:
        what, name = _TOLD[patch.setting]
        get_logger().warning(what, **{name: patch.new}, kind=kind, done=done)
    else:
        get_logger().warning("splitting the batch", rows=f"{patch.old} -> {patch.new}", kind=kind, done=done)
