"""What ``--gpus`` asks for: as many as the command needs, a number of them, or these."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from oomguard.errors import UsageError
from oomguard.placement.places import Place, named_by

_HOW = "--gpus auto, a number such as 2, or a list: 0,1 or 1, (GPU 1 alone) or GPU-UUID,…"


@dataclass(frozen=True, slots=True)
class Asked:
    """``count`` devices, or the ``named`` ones; as many as the command needs where it is neither."""

    count: int | None = None
    named: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """How it is written."""
        if self.named:
            return f"{','.join(self.named)}{',' if len(self.named) == 1 and self.named[0].isdigit() else ''}"
        return "auto" if self.count is None else str(self.count)

    def among(
        self, places: Sequence[Place], *, hidden: str | None = None, meant: Mapping[str, Sequence[Place]] | None = None
    ) -> tuple[Place, ...]:
        """Return the places that may be taken: those named, else all.

        Args:
            places: those that are there.
            hidden: what hides others, in words.
            meant: what each name meant when it was there; one that is there no longer cannot be used.

        Raises:
            UsageError: one that is named is not among them, or is named twice.
        """
        if not self.named:
            return tuple(places)
        found: list[Place] = []
        for entry in self.named:
            named = named_by(entry, places) or [_gone(one, places) for one in (meant or {}).get(entry, ())]
            if not named:
                there = ", ".join(place.shown for place in places) or "none"
                why = f"; {hidden}" if hidden else ""
                raise UsageError(
                    f"--gpus names {entry}, which is not among the devices here ({there}{why})", hint="oomguard gpus"
                )
            if again := [place for place in named if place in found]:
                raise UsageError(
                    f"--gpus {self.shown}: a device is named twice: {entry} is {again[0].shown}", hint=_HOW
                )
            found += named
        return tuple(found)


def _gone(place: Place, now: Sequence[Place]) -> Place:
    """Return a place that was there, with why it is not any more: a GPU that fell off keeps its number, and tells no UUID."""
    why = next((one.cannot for one in now if one.index == place.index and one.cannot is not None), None)
    return replace(place, free_bytes=None, cannot=why or "it is not there any more")


def read_gpus(text: str) -> Asked:
    """Read the value of ``--gpus``.

    Raises:
        UsageError: it is none.
    """
    text = text.strip()
    if text == "auto":
        return Asked()
    if re.fullmatch(r"\d{1,4}", text):
        if int(text) == 0:
            raise UsageError("--gpus 0: a command needs one device at least", hint=f"{_HOW}; GPU 0 alone is 0,")
        return Asked(int(text))
    entries = [entry.strip() for entry in text.removesuffix(",").split(",")]
    if not all(re.fullmatch(r"\d{1,4}|(?:GPU|MIG)-[\w/-]+", entry) for entry in entries):
        raise UsageError(f"--gpus {text!r}: not understood", hint=_HOW)
    if len(set(entries)) < len(entries):
        raise UsageError(f"--gpus {text}: a device is named twice", hint=_HOW)
    return Asked(len(entries), tuple(entries))
