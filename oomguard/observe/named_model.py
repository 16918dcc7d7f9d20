"""The one model that a text names by its size, where nothing beside it says that less of it is on the device."""

from __future__ import annotations

import re
from typing import Final

_SIZED: Final = re.compile(r"[\w./-]{0,80}(?<![\w.])(\d{1,3}(?:\.\d{1,2})?)[bB](?![A-Za-z0-9])[\w.-]{0,40}")
# Fewer bits, adapters, parts on the host or on other devices: what is on this one is not the whole at 16 bits.
_IN_PART: Final = re.compile(
    r"(?i)\b[2-8]-?bits?\b|int[48]\b|\bawq|gptq|gguf|ggml|exl2|\bq\d_|nf4|fp[48]|quanti[sz]|load_in|bitsandbytes|\bbnb"
    r"|offload|device_map|tensor[ _-]?parallel|-tp\b|\blora\b|qlora|peft|deepspeed|fsdp|\bzero-?\d|\branks?\d|a\d+b\b"
    r"|\b(?:[2-9]|\d\d|two|three|four|eight|multiple|several|multi)[ -]?[x*\u00d7]? ?(?:[\w-]+ ){0,2}"
    r"(?:GPUs|cards|[AHV]\d00|[345]0[6-9]0|T4|L40?S?|A40)"
)


def named_model(text: str) -> str | None:
    """Return the name of the one size of model in a text: "Qwen2.5-7B-Instruct"; None for none, for two, and for a part of one."""
    found = list(_SIZED.finditer(text))
    sizes = {float(match.group(1)) for match in found}
    if len(sizes) != 1 or min(sizes) < 1 or _IN_PART.search(text):
        return None
    return max((match.group().strip("./-_") for match in found), key=len)
