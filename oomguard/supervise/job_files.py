"""Which file of a job gives a setting: a change reaches an engine for one run, and is kept by editing what the job read.

Looked at are YAML and JSON files that the command's arguments name. A key counts where it is spelled as the setting is, in any
section, and has the value that the engine was given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from oomguard.facts import FactValue
from oomguard.incident import Incident
from oomguard.log import get_logger
from oomguard.regular_file import read_regular
from oomguard.remedy.policy import is_out_of_question
from oomguard.surfaces import surface

if TYPE_CHECKING:
    import yaml

_ENDS: Final = (".yaml", ".yml", ".json")
_MOST_BYTES: Final = 1 << 20
_MOST_NODES: Final = 10_000


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file gives a value: the file as the command names it, its line, and the key with its sections."""

    file: str
    line: int
    key: str


def tell_places(argv: Sequence[str], incident: Incident) -> None:
    """Say which keys of the job's own files give what the plan solved; nothing where none does."""
    for patch in incident.plan:
        if patch.new is None or patch.old is None or is_out_of_question(patch):
            continue
        for place in places_of(argv, patch.setting, patch.old, incident.framework):
            told = {"setting": patch.setting, "file": place.file, "line": place.line, "key": place.key}
            get_logger().info("the job's own file gives it; to keep a change, edit it there", **told, then=patch.new)


def places_of(argv: Sequence[str], setting: str, value: FactValue, engine: str) -> list[Place]:
    """Return the places where the files among a command's arguments give a setting this value, in their order."""
    own = surface(setting, engine)
    names = {_plain(name) for name in (setting, own.kwarg, own.config_key, *own.flags, *own.aliases) if name}
    found = []
    for file in dict.fromkeys(word.rpartition("=")[2] for word in argv if word.endswith(_ENDS)):
        given = {place.key: (place, text) for place, text in _read(file) if _plain(place.key.split(".")[-1]) in names}
        found += [
            place for place, text in given.values() if _is(text, own.own(value))
        ]  # of a repeated key the last one
    return found


def _read(file: str) -> Iterator[tuple[Place, str]]:
    """Yield every key of a file that has a plain value, with its text; nothing of a file that cannot be read."""
    import yaml

    try:
        root = yaml.compose(read_regular(Path(file), _MOST_BYTES).decode(), Loader=yaml.SafeLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return
    waiting: list[tuple[tuple[str, ...], yaml.Node | None]] = [((), root)]
    left = _MOST_NODES  # names for parts let a short file stand for endless ones
    while waiting and left > 0:
        keys, node = waiting.pop(0)
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        left -= 1 + len(pairs)
        for key, part in pairs:
            below = (*keys, str(key.value))
            if isinstance(part, yaml.ScalarNode):
                yield Place(file, part.start_mark.line + 1, ".".join(below)), str(part.value)
            else:
                waiting.append((below, part))


def _plain(name: str) -> str:
    return name.removeprefix("--").replace("-", "_").lower()


def _is(text: str, value: FactValue) -> bool:
    if isinstance(value, (bool, str)):
        return text.lower() == str(value).lower()
    try:
        return math.isclose(float(text), value)
    except (ValueError, OverflowError):
        return False
