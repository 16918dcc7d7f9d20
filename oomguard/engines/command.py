"""A command line as data: which settings it gives, and the same command with a setting changed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from oomguard.errors import SettingError
from oomguard.facts import FactValue
from oomguard.incident import SettingInForce
from oomguard.remedy.settings import SETTINGS, Setting, flag_words, parse_value


@dataclass(frozen=True, slots=True)
class Launch:
    """What is started: the command, and environment variables on top of the inherited ones."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        """The launch as a line to paste into a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def is_vllm_command(argv: tuple[str, ...]) -> bool:
    """Whether the command itself is vLLM's command line, so that flags reach the engine."""
    names = [PurePath(word).name for word in argv]
    if names and names[0].startswith("python"):
        if names[1:2] == ["-m"]:
            return len(argv) > 2 and argv[2].startswith("vllm.entrypoints.")
        names = names[1:]
    return names[:2] == ["vllm", "serve"]


def settings_given(argv: tuple[str, ...]) -> dict[str, SettingInForce]:
    """The settings that the command's flags give; of a repeated flag the last one, as argparse has it."""
    found: dict[str, SettingInForce] = {}
    for i, name, text in _flags(argv):
        knob = SETTINGS[name]
        if knob.type == "bool":
            value: FactValue | None = not argv[i].replace("_", "-").startswith("--no-")
        else:
            try:
                value = parse_value(name, text) if text is not None else None
            except SettingError:
                value = text
        found[name] = SettingInForce(name, value, True, "command")
    return found


def gives_config_file(argv: tuple[str, ...]) -> bool:
    """Whether settings also come from a file (``--config``), so that a flag that is absent tells nothing."""
    return any(word == "--config" or word.startswith("--config=") for word in argv)


def with_flag(launch: Launch, name: str, value: FactValue) -> Launch:
    """The launch with one flag changed, in its place; other spellings of it are removed, a new flag goes to the end.

    Raises KeyError where the setting has no flag.
    """
    new = flag_words(name, value)
    if new is None:
        raise KeyError(name)
    spans = [
        (i, i + (2 if text is not None and "=" not in launch.argv[i] else 1))
        for i, found, text in _flags(launch.argv)
        if found == name
    ]
    argv = list(launch.argv)
    for start, end in reversed(spans[:-1]):
        del argv[start:end]
    if not spans:
        return replace(launch, argv=(*argv, *new))
    shift = sum(end - start for start, end in spans[:-1])
    start, end = spans[-1][0] - shift, spans[-1][1] - shift
    return replace(launch, argv=(*argv[:start], *new, *argv[end:]))


def _flags(argv: tuple[str, ...]) -> list[tuple[int, str, str | None]]:
    """(index, setting, text of the value or None) for every known flag: ``--a-b V``, ``--a_b=V``, ``--no-a-b``."""
    by_flag: dict[str, Setting] = {row.flag: row for row in SETTINGS.values() if row.flag}
    found: list[tuple[int, str, str | None]] = []
    for i, word in enumerate(argv):
        match = re.fullmatch(r"(--[A-Za-z][\w-]*)(?:=(.*))?", word, re.DOTALL)
        if match is None:
            continue
        spelled = match.group(1).replace("_", "-")
        knob = by_flag.get(spelled) or by_flag.get(spelled.replace("--no-", "--", 1))
        if knob is None:
            continue
        text = match.group(2)
        if text is None and knob.type != "bool" and i + 1 < len(argv):
            text = argv[i + 1]
        found.append((i, knob.name, text))
    return found
