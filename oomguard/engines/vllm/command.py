"""Read and change the command that starts vLLM: its flags, its ``--config`` file, its variables.

The command is also found behind wrappers. A program that starts the engine in its own code is not
found here; only its variables can be changed.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import SettingError
from oomguard.core.facts import Fact, FactValue
from oomguard.core.files import read_regular, read_tables
from oomguard.core.incident import SettingInForce
from oomguard.core.settings import surface, surfaces, table_of
from oomguard.engines.command import Launch, flag_edits, settings_given
from oomguard.engines.unwrap_command import Edit, InnerCommand, Unread, inner_commands
from oomguard.scan.context import CONFIG_FILE

NAME: Final = "vllm"
_FILE: Final = Path(__file__).with_name("commands.toml")
_MODULE: Final = "module:"
_ALLOWED: Final = "VLLM_PLUGINS"
_PATH: Final = "PYTHONPATH"
_PLUGIN: Final = "oomguard"
# Limits for a --config file, which the user may have named by mistake.
_MOST_BYTES: Final = 1 << 20
_MOST_CHARS: Final = 65_536
_MOST_PARTS: Final = 10_000
_ENDS: Final = (".yaml", ".yml")


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
        # The unread file may set what no flag sets, so a new flag goes to the end.
        if file is None:
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
        named = []
        for before, after in itertools.pairwise(args):
            if before == flag and not after.startswith("-"):
                named.append(after)
        for word in args:
            if word.startswith(f"{flag}="):
                named.append(word.partition("=")[2])
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
        flags_given = sum(map(self.command.args.count, self.row["flags"]))
        if has_unread_word or flags_given > 1:
            return False
        if self._arguments() and "{" in text:
            return text.startswith("{")
        return all("=" in part for part in filter(None, text.split(",")))

    def settings(self) -> dict[str, SettingInForce]:
        """Return the settings that the flag gives; the program may add others."""
        names = {own.kwarg: name for name, own in surfaces(NAME).items()}
        # Settings without an argument.
        names.pop(None, None)
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
            spelling = own.kwarg
            # The program may spell the argument in another way; keep the user's spelling.
            for key, kwarg in self.row["spelled"].items():
                if kwarg == own.kwarg and key in arguments:
                    spelling = key
                    break
            arguments[spelling] = own.to_engine(value)
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
        arguments: dict[str, Any] = {}
        for part in text.split(","):
            key, equals, value = part.partition("=")
            if equals:
                arguments[key.strip()] = value
        return arguments

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
    found = []
    for command in inner_commands(argv):
        carrier = _carrier(command)
        if carrier is not None:
            found.append(carrier)
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
    pairs = list(itertools.pairwise(args))
    for word in args:
        flag, equals, value = word.partition("=")
        if equals:
            pairs.append((flag, value))
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


# --- the environment ---
#
# Variables may set the same things as flags, and variables carry the plugin. A wrapper in the
# command (``env``, a shell's text) may override our variables; then ours are set behind that
# wrapper.


def set_by_variable(
    launch: Launch, name: str, facts: Mapping[str, Fact], environ: Mapping[str, str]
) -> SettingInForce | None:
    """Return a setting that a variable sets over its flag on this device; None without one."""
    for row in surface(name, NAME).variables:
        where = facts.get(row["where"])
        text = _value(launch, row["name"], environ)
        if text is None or where is None or not where.value:
            continue
        try:
            value: FactValue | None = int(text) * row["unit_bytes"]
        except ValueError:
            # The engine itself rejects a text that is not a number.
            value = None
        return SettingInForce(name, value, True, f"{row['name']}={text}")
    return None


def without_variables(
    launch: Launch, settings: Mapping[str, FactValue], environ: Mapping[str, str]
) -> Launch:
    """Return the launch without the variables that would override the given settings.

    A variable that an earlier command of a shell's text exports stays. oomguard then reports that
    it overrides the change.
    """
    names: list[str] = []
    for setting in settings:
        names += [row["name"] for row in surface(setting, NAME).variables]
    launch = functools.reduce(_without_assignments, names, launch)
    words: list[str] = []
    for name in names:
        if environ.get(name) and not _sets_by_itself(launch, name):
            words += ("-u", name)
    if words:
        return replace(launch, argv=("env", *words, *launch.argv))
    return launch


def _without_assignments(launch: Launch, name: str) -> Launch:
    """Return the launch without its wrappers' assignments of a variable."""
    while (inner := _inner(launch)) is not None and name in inner.without:
        launch = replace(launch, argv=inner.without[name]())
    return launch


def with_plugin(
    launch: Launch, variables: Mapping[str, str], folder: Path | None, environ: Mapping[str, str]
) -> Launch:
    """Return the launch with our variables, and with those that make vLLM load the plugin.

    Args:
        launch: the command.
        variables: our variables.
        folder: a folder with the plugin, for a Python without oomguard; None if that Python has it.
        environ: the inherited environment.
    """
    env = {**launch.env, **variables}
    if folder is not None:
        env[_PATH] = os.pathsep.join([str(folder), *filter(None, [_value(launch, _PATH, environ)])])
    allowed = _value(launch, _ALLOWED, environ)
    # Join the user's allow-list, but never create one: it would turn other plugins off.
    if allowed is not None:
        names = filter(None, allowed.split(","))
        env[_ALLOWED] = ",".join(dict.fromkeys([*names, _PLUGIN]))
    inner = _inner(launch)
    if inner is not None and inner.set_variables is not None:
        if inner.has_no_others:
            return replace(launch, argv=inner.set_variables(env), env={})
        # Only where the wrapper sets them too: ours come last then.
        beaten = {name: env[name] for name in env.keys() & inner.variables.keys()}
        if beaten:
            return replace(launch, argv=inner.set_variables(beaten), env=env)
    return replace(launch, env=env)


def _inner(launch: Launch) -> InnerCommand | None:
    found = inner_commands(launch.argv)
    if found:
        return found[-1]
    return None


def _sets_by_itself(launch: Launch, name: str) -> bool:
    inner = _inner(launch)
    return inner is not None and (name in inner.variables or inner.has_no_others)


def _value(launch: Launch, name: str, environ: Mapping[str, str]) -> str | None:
    """Return a variable as the innermost command sees it; None if it is unset or empty."""
    inner = _inner(launch)
    if inner is not None and name in inner.variables:
        found = inner.variables[name]
    elif inner is not None and inner.has_no_others:
        found = None
    else:
        found = launch.env.get(name, environ.get(name))
    if found or name == _ALLOWED:
        return found
    return None


# --- the file of --config, which is never written ---


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
    counts = Counter(str(key.value) for key, _value in node.value)
    repeated = tuple(counts - Counter(counts.keys()))
    source = f"{CONFIG_FILE} {path}"
    if is_of_subcommand:
        off = "off_of_subcommand"
    else:
        off = "off"
    words: list[str] = []
    for key, raw in whole.items():
        words += _words_of_key(str(key), raw, engine, off)
    found = {}
    for name, one in settings_given(words, engine, own=True).items():
        found[name] = replace(one, source=source)
    repeated_words: list[str] = []
    for key in repeated:
        repeated_words += _words_of_key(key, whole[key], engine, off)
    for name in settings_given(repeated_words, engine, own=True):
        twice = f"{source}, which sets it twice: the last value counts"
        found[name] = replace(found[name], source=twice)
    return ConfigFile(path, found, repeated)


def _words_of_key(key: str, raw: Any, engine: str, off: str) -> list[str]:
    """Return the command-line words that vLLM's reader makes of a key and its value."""
    if isinstance(raw, bool):
        return _flag_of_key(key, engine, "on" if raw else off)
    given = _as_words(raw)
    if given is None:
        return []
    return [*_flag_of_key(key, engine, "on"), *given]


def _flag_of_key(key: str, engine: str, form: str) -> list[str]:
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
