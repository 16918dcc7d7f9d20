"""Read the settings in the file of ``vllm serve --config FILE``; the file is never written."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.files import read_regular
from oomguard.core.incident import SettingInForce
from oomguard.core.settings import table_of
from oomguard.engines.command import settings_given
from oomguard.scan.effective_settings import CONFIG_FILE

_MOST_BYTES: Final = 1 << 20
_MOST_CHARS: Final = 65_536
_MOST_PARTS: Final = 10_000
_ENDS: Final = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The settings of a file by name, and the keys that it repeats (the last value counts)."""

    path: str
    settings: dict[str, SettingInForce]
    repeated: tuple[str, ...] = ()


def read_config_file(path: str, engine: str, *, is_of_subcommand: bool) -> ConfigFile | None:
    """Return the settings of a file as vLLM's own reader takes them; None if it cannot be read.

    Args:
        path: the file.
        engine: the engine whose reader takes it.
        is_of_subcommand: whether the flags belong to a subcommand (``vllm serve``). vLLM reads the
            file before it knows which.
    """
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
    source = f"{CONFIG_FILE} {path}"
    if is_of_subcommand:
        off = "off_of_subcommand"
    else:
        off = "off"
    twice = settings_given(
        [word for key in repeated for word in _words(key, whole[key], engine, off)],
        engine,
        own=True,
    )
    given = settings_given(
        [word for key, raw in whole.items() for word in _words(str(key), raw, engine, off)],
        engine,
        own=True,
    )
    twice_source = f"{source}, which sets it twice: the last value counts"
    found = {
        name: replace(one, source=twice_source if name in twice else source)
        for name, one in given.items()
    }
    return ConfigFile(path, found, repeated)


def _words(key: str, raw: Any, engine: str, off: str) -> list[str]:
    """Return the command-line words that vLLM's reader makes of a key and its value."""
    if isinstance(raw, bool):
        return _flag(key, engine, "on" if raw else off)
    given = _as_words(raw)
    if given is None:
        return []
    return [*_flag(key, engine, "on"), *given]


def _flag(key: str, engine: str, form: str) -> list[str]:
    return [word.replace("KEY", key) for word in table_of(engine, "config_file")[form]]


def _is_small(raw: Any) -> bool:
    """Return whether a value has few parts; YAML aliases can multiply those of a short file."""
    waiting = [raw]
    left = _MOST_PARTS
    while waiting and left > 0:
        part = waiting.pop()
        left -= 1
        if isinstance(part, (list, dict)):
            waiting += itertools.islice(part if isinstance(part, list) else part.values(), left + 1)
    return not waiting


def _as_words(raw: Any) -> list[str] | None:
    """Return a value as the words that vLLM's reader makes of it; None if it makes none."""
    if raw is None or not _is_small(raw):
        return None
    if isinstance(raw, list):
        return [str(item)[:_MOST_CHARS] for item in raw] or None
    try:
        return [(json.dumps(raw) if isinstance(raw, dict) else str(raw))[:_MOST_CHARS]]
    except (TypeError, ValueError, RecursionError):
        # A date inside an object, or a number with thousands of digits.
        return None
