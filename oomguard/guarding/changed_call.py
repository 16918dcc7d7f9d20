"""A call as it runs now: as it was made, or with some of its settings changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from oomguard.engines.protocol import WatchedCall
from oomguard.facts import FactValue
from oomguard.guarding.frames import frames_of
from oomguard.incident import Effect, Patch
from oomguard.log import get_logger
from oomguard.remedy.call_variants import CACHE, CHUNK, VARIED, Variant
from oomguard.settings import effect_of

_MESSAGES: Final[Mapping[str, tuple[str, str]]] = {
    "attn_implementation": ("running attention without its scores", "attention"),
    CHUNK: ("processing the prompt in chunks", "tokens"),
    CACHE: ("keeping the cache another way", "cache"),
    "max_new_tokens": ("cutting the answers", "tokens"),
    "truncate_prompt_tokens": ("cutting the prompts", "tokens"),
}


class ChangedCall:
    """A call and what of it is changed.

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
        """Note the functions that a failure went through: what no failure of the call left may have run already."""
        functions = frozenset(frame.f_code.co_name for frame in frames_of(error))
        self._failed_in = functions if self._failed_in is None else self._failed_in & functions

    def change(self, setting: str, value: FactValue) -> None:
        """Change one more setting, if that can be done."""
        changed = self._with(setting, value)
        if isinstance(changed, str):
            self._refused[setting] = changed
        else:
            self.call, self.settings[setting] = changed, value

    def take_back(self, why: str) -> dict[str, FactValue]:
        """Go back to the call as it was made, and return what was changed."""
        self._refused.update(dict.fromkeys(self.settings, f"with it: {why}"))
        changed, self.call, self.settings = self.settings, self.made, {}
        return changed

    @property
    def lasting(self) -> dict[str, FactValue]:
        """What later calls may begin with: what changes no output."""
        return {name: v for name, v in self.settings.items() if effect_of(name, None, v) is Effect.OUTPUT_PRESERVING}

    def variants(self) -> dict[str, Variant]:
        """Return what may be done another way; empty if the call has no prompt of known length."""
        prompt, new = self.made.prompt_tokens, self.made.max_new_tokens
        if prompt is None:
            return {}
        now: dict[str, FactValue | None] = {CHUNK: prompt, "max_new_tokens": new, "truncate_prompt_tokens": prompt}
        now.update(self.settings)
        return {name: self._variant(name, now.get(name)) for name in VARIED}

    def _variant(self, name: str, now: FactValue | None) -> Variant:
        def why_not(value: FactValue) -> str | None:
            if name in self._refused:
                return self._refused[name]
            changed = self._with(name, value)
            return changed if isinstance(changed, str) else None

        def row_bytes(value: FactValue) -> int | None:
            changed = self._with(name, value)
            return None if isinstance(changed, str) else changed.estimated_row_bytes

        return Variant(now, why_not, row_bytes, is_changed=name in self.settings)

    def _with(self, name: str, value: FactValue) -> WatchedCall | str:
        return self.made.varied({**self.settings, name: value}, self._failed_in)


def log_patch(patch: Patch, kind: str | None, done: int) -> None:
    """Log what changes, and after how many rows."""
    if patch.setting in _MESSAGES:
        message, name = _MESSAGES[patch.setting]
        get_logger().warning(message, **{name: patch.new}, kind=kind, done=done)
    else:
        get_logger().info("splitting the batch", rows=f"{patch.old} -> {patch.new}", kind=kind, done=done)
