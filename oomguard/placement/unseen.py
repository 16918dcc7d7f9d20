"""Devices that ``--gpus`` names where NVML does not answer: their numbers are all that is known of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from oomguard.placement.asked import Asked
from oomguard.placement.places import VISIBLE, Place, limited

_NUMBER: Final = re.compile(r"\d{1,9}")


def named_unseen(asked: Asked, environ: Mapping[str, str]) -> tuple[Place, ...] | None:
    """Return the devices that are named by number; None where nothing tells which are meant, and the command runs as it is.

    That is so without a list, with a UUID in it, and where CUDA_VISIBLE_DEVICES names devices by UUID: they may be these or others.

    Raises:
        UsageError: CUDA_VISIBLE_DEVICES hides one that is named.
    """
    visible = [entry.strip() for entry in environ.get(VISIBLE, "").split(",")]
    if not asked.named or not all(map(str.isdigit, asked.named)) or any("-" in entry[1:] for entry in visible):
        return None
    numbers = {int(text) for text in (*asked.named, *visible) if _NUMBER.fullmatch(text)}
    limit = limited([Place(number, None) for number in sorted(numbers)], environ)
    return asked.among(limit.places, hidden=limit.hides)
