"""The exact bytes of an array whose shape and type an error names, where its message rounds them: numpy prints three digits."""

from __future__ import annotations

import math
import re
from typing import Final

from oomguard.incident import Incident

_BITS: Final = re.compile(r"(?:u?int|float|complex)(8|16|32|64|128)")
_OF_NAME: Final = {"bool": 1, "object": 8}


def array_bytes(incident: Incident) -> int | None:
    """Return the bytes of the array that was refused, None where the message names no shape or no plain type."""
    shape, name = (incident.facts.get(fact) for fact in ("array_shape", "array_type"))
    if shape is None or name is None:
        return None
    counts = re.findall(r"\d{1,18}", str(shape.value))
    bits = _BITS.fullmatch(str(name.value))
    element = int(bits.group(1)) // 8 if bits else _OF_NAME.get(str(name.value))
    return None if element is None or not counts else math.prod(map(int, counts)) * element
