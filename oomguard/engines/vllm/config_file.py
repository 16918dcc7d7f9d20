"""The file of ``vllm serve --config FILE``: which settings it gives; it is read and never written."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oomguard.engines.command import value_of
from oomguard.engines.flags import Flag
from oomguard.errors import SettingError
from oomguard.facts import FactValue
from oomguard.incident import SettingInForce
from oomguard.observe.settings_in_force import CONFIG_FILE
from oomguard.regular_file import read_regular
from oomguard.surfaces import surfaces

_MOST_BYTES: Final = 1 << 20
_MOST_CHARS: Final = 65_536
_MOST_PARTS: Final = 10_000
_ENDS: Final = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file gives: settings by name, and the keys that it gives more than once (the last one counts)."""

    path: str
    settings: dict[str, SettingInForce]
    repeated: tuple[str, ...] = ()


def read_config_file(path: str, engine: str) -> ConfigFile | None:
    """Return the settings of a file as the engine's own reader takes them; None where it cannot be read."""
    if not path.endswith(_ENDS):
        return None
    import yaml

    try:
        text = read_regular(Path(path), _MOST_BYTES).decode()
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        whole = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    if not isinstance(whole, dict) or not isinstance(node, yaml.MappingNode):
        return None
    keys = [str(key.value) for key, _value in node.value]
    repeated = tuple(dict.fromkeys(key for i, key in enumerate(keys) if key in keys[:i]))
    names = _names(engine)
    found: dict[str, SettingInForce] = {}
    source = f"{CONFIG_FILE} {path}"
    for key, raw in whole.items():
        told = f"{source}, where it stands twice: the last one counts"
        name = names.get(str(key).replace("_", "-"))
        if name is not None and (given := _as_words(raw)) is not None:
            found[name] = SettingInForce(
                name, _value(name, raw, given, engine), True, told if key in repeated else source
            )
    return ConfigFile(path, found, repeated)


def _names(engine: str) -> dict[str, str]:
    """Return the settings by the keys that a file may have for them: those of each flag, without its dashes."""
    rows = [(name, own) for name, newest in surfaces(engine).items() for own in (newest, *newest.others)]
    named = {
        flag.removeprefix("--"): name
        for name, own in rows
        for flag in (*own.flags, *own.aliases)
        if flag.startswith("--")
    }
    return named | {own.config_key: name for name, own in rows if own.config_key is not None}


def _is_small(raw: Any) -> bool:
    """Return whether a value has few parts: names for parts let a short file stand for endless ones."""
    waiting, left = [raw], _MOST_PARTS
    while waiting and left > 0:
        part = waiting.pop()
        left -= 1
        if isinstance(part, (list, dict)):
            waiting += itertools.islice(part if isinstance(part, list) else part.values(), left + 1)
    return not waiting


def _as_words(raw: Any) -> str | None:
    """Return a value as the engine's reader turns it into words; None where it gives none."""
    if raw is None or raw is False or not _is_small(raw):
        return None
    if isinstance(raw, list):
        return " ".join(str(item) for item in raw)[:_MOST_CHARS] or None
    try:
        return (json.dumps(raw) if isinstance(raw, dict) else str(raw))[:_MOST_CHARS]
    except (TypeError, ValueError, RecursionError):  # a date inside an object, a number of thousands of digits
        return None


def _value(name: str, raw: Any, text: str, engine: str) -> FactValue | None:
    if isinstance(raw, bool):
        return raw
    try:
        return value_of(Flag(name, 0, 0, text, None), engine)
    except SettingError:
        return text
