"""Check Python values of settings against the fields of the records."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, Final

from oomguard.core.errors import SettingError, UsageError
from oomguard.core.facts import FactValue, parse_size
from oomguard.estimate.start.start import VllmSettings

SettingValue = FactValue | Mapping[str, Any] | None
# Fields of the records that are not settings: the device, the model, and a measured start.
_NO_SETTINGS: Final = frozenset(
    {
        "compile_cache_entry",
        "config",
        "correction",
        "device",
        "device_free_bytes",
        "device_free_from",
        "driver_version",
        "gpu_name",
        "gpu_total_bytes",
        "peak_activation_ratio",
        "version",
    }
)


def types_of(record: type) -> dict[str, str]:
    """Return the type of each setting of a record: "int", "float", "bool" or "str"."""
    own = {field.name: str(field.type).removesuffix(" | None") for field in fields(record)}
    return {name: kind for name, kind in own.items() if name not in _NO_SETTINGS}


START_SETTINGS: Final = types_of(VllmSettings)


def read_values(
    values: Mapping[str, SettingValue], known: Mapping[str, str], arguments: Collection[str] = ()
) -> dict[str, Any]:
    """Check the values of settings by canonical name; None leaves a setting to the engine.

    Args:
        values: a value for each setting. Bytes may be a size such as ``4GiB``, and a JSON text may
            be a dict.
        known: the known settings with their types.
        arguments: the caller's other arguments, so that a misspelled one gets the right suggestion.

    Raises:
        SettingError: a setting is unknown, with the nearest known one, or a value is invalid.
    """
    found = {}
    for name, value in values.items():
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, [*known, *arguments], n=1, cutoff=0.6)
            raise SettingError(
                f"unknown setting: {name}",
                hint=f"did you mean {near[0]}?"
                if near
                else f"known settings: {', '.join(sorted(known))}",
            )
        if value is not None:
            found[name] = _READERS[known[name]](name, value)
    return found


def _read_count(name: str, value: object) -> int:
    if isinstance(value, str) and name.endswith("_bytes"):
        value = parse_size(value).bytes
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise SettingError(f"{name} is {value!r}, not a whole number")
    count = operator.index(value)
    least = 0 if name == "cpu_offload_bytes" else 1
    if count < least:
        raise SettingError(f"{name} is {count}, less than {least}")
    return count


def _read_share(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(f"{name} is {value!r}, not a number")
    if not math.isfinite(value) or not 0 < value <= 1:
        raise SettingError(f"{name} is {value}, not a share above 0 and up to 1")
    return float(value)


def _read_switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SettingError(f"{name} is {value!r}, neither True nor False")
    return value


def _read_text(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        try:
            return json.dumps(value)
        except (TypeError, ValueError) as error:
            raise SettingError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, str):
        raise SettingError(f"{name} is {value!r}, not a text")
    return value


_READERS: Final[Mapping[str, Callable[[str, object], Any]]] = {
    "int": _read_count,
    "float": _read_share,
    "bool": _read_switch,
    "str": _read_text,
}


def parse_word(name: str, word: str, known: Mapping[str, str]) -> Any:
    """Parse one word of a command line as a setting's value; raises SettingError if invalid."""
    kind = known[name]
    try:
        typed: FactValue = word
        if kind == "int" and not name.endswith("_bytes"):
            typed = int(word)
        elif kind == "float":
            typed = float(word)
        return _READERS[kind](name, typed)
    except (ValueError, UsageError):
        raise SettingError(f"{name} is not {word!r}") from None
