"""What a refused allocation asked for, where it is printed as a count of elements, or beside a message and not in it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from oomguard.facts import Fact
from oomguard.incident import Incident
from oomguard.observe.hits import Hit, captured
from oomguard.observe.search_time import SearchTime
from oomguard.observe.window import Window
from oomguard.rules.lexicon import Lexicon

LINE_CHARS: Final = 600
_ASKED: Final = "tried_bytes"
# Messages that speak of tokens, blocks or shares print their own figures.
_OF_ALLOCATIONS: Final = frozenset(
    {"cuda_oom", "hip_oom", "xpu_oom", "npu_oom", "mps_oom", "llamacpp_oom", "nccl_oom", "host_oom", "other"}
)
_NEED: Final = re.compile(r"\W*(?:need|requir)", re.IGNORECASE)
_COUNT: Final = (
    r"\s*(?:(?P<unit>floats?|doubles?)\b|(?:elements?|values|items|entries|numbers)\b"
    r"(?:(?: of)?(?: d?type)?:? ?(?:torch\.|np\.|numpy\.)?(?P<type>[a-z]+\d*))?|(?:tokens|blocks|pages|rows|samples|cells)\b|[eE]\d)"
)
_TYPE_BYTES: Final = {
    "float64": 8, "double": 8, "doubles": 8, "int64": 8, "float32": 4, "float": 4, "floats": 4, "fp32": 4, "int32": 4,
    "float16": 2, "half": 2, "fp16": 2, "bfloat16": 2, "bf16": 2, "int16": 2, "int8": 1, "uint8": 1, "byte": 1,
}  # fmt: skip


@functools.cache
def _count() -> re.Pattern[str]:
    return re.compile(_COUNT)  # which takes longer than a small log


def sized(part: Any, text: str) -> Mapping[str, Fact]:
    """Return the facts of a clause's match; a count of elements becomes bytes by their type, any other count no size."""
    facts = captured(part)
    asked = facts.get(_ASKED)
    count = _count().match(text, part.end()) if asked is not None and not asked.slack else None
    if asked is None or count is None:
        return facts
    size = _TYPE_BYTES.get(count["unit"] or count["type"] or "")
    others = {name: fact for name, fact in facts.items() if name != _ASKED}
    return others if size is None else {**others, _ASKED: replace(asked, value=round(float(asked.value) * size))}


def with_asked_size(
    incident: Incident, lexicon: Lexicon | None, window: Window, hit: Hit, time: SearchTime
) -> Incident:
    """Return an incident with the size that stands on its message's line, where the message itself holds none."""
    if lexicon is None or _ASKED in incident.facts or incident.kind not in _OF_ALLOCATIONS:
        return incident
    line, at = window.line_around(hit.position)
    near = line[max(0, at - LINE_CHARS) : at + LINE_CHARS]
    try:
        for clause in lexicon.clauses:
            part = time.search(clause, near)
            if part is None or _NEED.match(part.group()):
                continue
            fact = sized(part, near).get(_ASKED)
            if fact is not None:
                fact = replace(fact, line=window.lines[hit.first].number)
                return replace(incident, facts={**incident.facts, _ASKED: fact})
    except TimeoutError:
        pass
    return incident
