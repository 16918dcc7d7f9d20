"""Read and change a command that gives vLLM settings in flags, or in one flag's value.

The command is also found behind wrappers. A program that starts the engine in its own code is not
found here.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import SettingError
from oomguard.core.facts import FactValue
from oomguard.core.files import read_tables
from oomguard.core.incident import SettingInForce
from oomguard.core.setting_spellings import surface, surfaces
from oomguard.engines.command import flag_edits, settings_given
from oomguard.engines.unwrap_command import Edit, InnerCommand, Unread, inner_commands
from oomguard.engines.vllm.config_file import ConfigFile, read_config_file

NAME: Final = "vllm"
_FILE: Final = Path(__file__).with_name("commands.toml")
_MODULE: Final = "module:"


@functools.cache
def table() -> Mapping[str, Any]:
    """Return the contents of commands.toml."""
    return next(iter(read_tables("vllm_commands", [_FILE]).values()))


@dataclass(frozen=True, slots=True)
class ByFlags:
    """A command whose flags are the engine's."""

    command: InnerCommand

    def config(self) -> ConfigFile | None:
        """Return the file of flags that the command names; None without one, or if unreadable."""
        path = self._config_path()
        if path is None or isinstance(path, Unread) or self.command.is_elsewhere:
            return None
        args = self.command.args
        return read_config_file(path, NAME, is_of_subcommand=not str(args[0]).startswith("-"))

    def settings(self) -> dict[str, SettingInForce]:
        """Return the settings that the command gives; a flag overrides its file."""
        given = {**self._model(), **settings_given(self.command.args, NAME, own=True)}
        if self.command.has_unread:
            given = {name: replace(setting, source="given") for name, setting in given.items()}
        if self._config_path() is None:
            return given
        file = self.config()
        if file is None:  # the unread file may set what no flag sets
            return {name: replace(setting, source="given") for name, setting in given.items()}
        return {**file.settings, **given}

    def changed(self, settings: Mapping[str, FactValue], version: str | None) -> tuple[str, ...]:
        """Return the whole command line with these settings changed."""
        args = self.command.args
        edits = list[Edit]()
        at_end = self.command.has_unread
        for name, value in settings.items():
            edits += flag_edits(args, name, value, NAME, version, own=True, at_end=at_end)
        return self.command.change(_joined(edits))

    def _model(self) -> dict[str, SettingInForce]:
        """Return the model that the command names, as a setting; empty without one."""
        args = self.command.args
        flag = table()["model"]
        named = [
            after
            for before, after in itertools.pairwise(args)
            if before == flag and not after.startswith("-")
        ]
        named += [word.partition("=")[2] for word in args if word.startswith(f"{flag}=")]
        if args[:1] == (table()["with_model"],) and len(args) > 1 and not args[1].startswith("-"):
            named.append(args[1])
        if named:
            return {"model": SettingInForce("model", named[-1], True, "command")}
        return {}

    def _config_path(self) -> str | None:
        args = self.command.args
        flag = table()["config"]
        if flag in args:
            at = args.index(flag)
        else:
            at = len(args)
        if at + 1 < len(args):
            return args[at + 1]
        return None


@dataclass(frozen=True, slots=True)
class ByArguments:
    """A command that takes engine arguments in one flag, as ``key=value,key=value`` or as JSON."""

    command: InnerCommand
    row: Mapping[str, Any]

    @property
    def is_read(self) -> bool:
        """Return whether oomguard understands the flag's value.

        It does not if an argument spans several words of the shell, or contains commas.
        """
        start, end, _flag = self._place()
        words = self.command.args[start:end]
        text = self._text()
        has_unread_word = any(isinstance(word, Unread) for word in words)
        flags_given = [word for word in self.command.args if word in self.row["flags"]]
        if has_unread_word or len(flags_given) > 1:
            return False
        if self._arguments() and "{" in text:
            return text.startswith("{")
        return all("=" in part for part in text.split(",") if part)

    def settings(self) -> dict[str, SettingInForce]:
        """Return the settings that the flag gives; the command may add others of its own."""
        names = {own.kwarg: name for name, own in surfaces(NAME).items() if own.kwarg}
        found = {}
        for key, raw in self._arguments().items():
            name = names.get(self.row["spelled"].get(key, key))
            text = str(raw)
            if name is None or raw is None:
                continue
            try:
                value: FactValue | None = surface(name, NAME).from_engine(name, text)
            except SettingError:
                if text in surface(name, NAME).automatic:
                    value = None
                else:
                    value = text
            found[name] = SettingInForce(name, value, True, "given")
        return found

    def changed(self, settings: Mapping[str, FactValue], version: str | None) -> tuple[str, ...]:
        """Return the whole command line with these settings changed."""
        arguments: dict[str, Any] = dict(self._arguments())
        for name, value in settings.items():
            own = surface(name, NAME, version)
            if own.kwarg is None:
                raise KeyError(name)
            also = [
                key
                for key, other in self.row["spelled"].items()
                if other == own.kwarg and key in arguments
            ]
            arguments[also[0] if also else own.kwarg] = own.to_engine(value)
        return self.command.change([self._edit(arguments)])

    def _edit(self, arguments: Mapping[str, Any]) -> Edit:
        start, end, flag = self._place()
        pairs = [f"{key}={value}" for key, value in arguments.items()]
        if self._text().startswith("{"):
            words: tuple[str, ...] = (json.dumps(arguments),)
        elif end - start > 1:
            words = tuple(pairs)
        else:
            words = (",".join(pairs),)
        if flag.endswith("="):
            words = (f"{flag}{words[0]}",)
        elif flag:
            words = (flag, *words)
        return Edit(start, end, words)

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments as written: texts, or the values of a JSON object."""
        text = self._text()
        if text.startswith("{"):
            try:
                found = json.loads(text)
            except (ValueError, RecursionError):
                return {}
            if isinstance(found, dict):
                return found
            return {}
        pairs = (part.partition("=") for part in text.split(",") if "=" in part)
        return {key.strip(): value for key, _equals, value in pairs}

    def _text(self) -> str:
        start, end, flag = self._place()
        words = self.command.args[start:end]
        if flag.endswith("=") and words:
            return words[0].partition("=")[2]
        return ",".join(words)

    def _place(self) -> tuple[int, int, str]:
        """Return the start and end of the arguments' words, and the flag that an edit needs."""
        args = self.command.args
        flags = self.row["flags"]
        for at in reversed(range(len(args))):
            flag, equals, _value = args[at].partition("=")
            if flag not in flags:
                continue
            if equals:
                return at, at + 1, f"{flag}="
            end = at + 1
            while end < len(args) and not args[end].startswith("-"):
                end += 1
            return at + 1, end, ""
        return len(args), len(args), flags[0]


def own_command(argv: Sequence[str]) -> ByFlags | ByArguments | None:
    """Return the only command that gives vLLM settings; None without one, or with several."""
    found = [
        carrier for command in inner_commands(argv) if (carrier := _carrier(command)) is not None
    ]
    if len(found) == 1:
        return found[0]
    return None


def _carrier(command: InnerCommand) -> ByFlags | ByArguments | None:
    rows = table()
    words = (command.program, *command.args)
    if command.program.startswith(_MODULE):
        module = command.program.removeprefix(_MODULE)
    else:
        module = None
    if any(words[: len(own)] == tuple(own) for own in rows["own"]):
        return ByFlags(command)
    if module is not None and any(module.startswith(name) for name in rows["modules"]):
        return ByFlags(command)
    for row in rows["arguments"]:
        if command.program in row["programs"] and _holds(command.args, row["when"]):
            carrier = ByArguments(command, row)
            if carrier.is_read:
                return carrier
            return None
    return None


def _holds(args: Sequence[str], when: Mapping[str, Any]) -> bool:
    """Return whether one of the flags has one of the values."""
    pairs = [(word.partition("=")[0], word.partition("=")[2]) for word in args if "=" in word]
    pairs += list(itertools.pairwise(args))
    return any(flag in when["flags"] and value in when["values"] for flag, value in pairs)


def _joined(edits: Sequence[Edit]) -> list[Edit]:
    """Return the edits with all words for one place joined into one edit, in their order."""
    joined: dict[tuple[int, int], Edit] = {}
    for edit in edits:
        key = (edit.start, edit.end)
        known = joined.get(key)
        if known is None:
            joined[key] = edit
        else:
            joined[key] = replace(known, words=(*known.words, *edit.words))
    return list(joined.values())
