"""Settings whose flag names a variable of the script that is pasted with the failure: ``$LEN`` below ``LEN=8192``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from oomguard.facts import Fact, FactValue, is_of_type
from oomguard.settings import SETTING_FACTS

_ASSIGNED: Final = re.compile(
    r"\s{0,40}(?:(?:export|local|readonly|set)\s)?(?P<name>[A-Za-z_]\w{0,60})=(?P<quote>[\"']?)"
    r"(?P<value>\d{1,12}(?:\.\d{1,6})?)(?P=quote)\s*(?:#.*|;)?$"
)
# A flag and its variable, or what stands where the variable is not set: ${LEN:-8192}.
_FLAG: Final = re.compile(
    r"(?<![\w-])--(?P<flag>[a-z][a-z0-9_-]{2,40})[\s=]{1,4}[\"']?"
    r"\$\{?(?P<name>[A-Za-z_]\w{0,60})(?::?-(?P<default>\d{1,12}(?:\.\d{1,6})?)\})?"
)


def script_values(lines: Iterable[tuple[int, str]]) -> Mapping[str, Fact]:
    """Return the facts of settings that a script gives through its variables; of several starts the first one's.

    Args:
        lines: lines of an input with their numbers, in order.
    """
    assigned: dict[str, str] = {}
    found: dict[str, Fact] = {}
    for number, text in lines:
        if "=" in text and (one := _ASSIGNED.match(text)) is not None:
            assigned[one["name"]] = one["value"]
        if "$" not in text or "--" not in text:
            continue
        for one in _FLAG.finditer(text):
            fact_name = SETTING_FACTS.get(one["flag"].replace("-", "_"))
            said = assigned.get(one["name"], one["default"])
            if fact_name is None or said is None:
                continue
            value: FactValue = float(said) if "." in said else int(said)
            if is_of_type(fact_name, value):
                found.setdefault(fact_name, Fact(fact_name, value, "stated", line=number))
    return found
