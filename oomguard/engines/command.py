"""A command line as data: which settings its flags give, and the same command with a setting changed."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from oomguard.engines.flags import Flag, flags_in, merged_object
from oomguard.engines.inner_command import Edit, replaced
from oomguard.engines.shell_text import Unread
from oomguard.engines.started import EngineChange, StartedEngine, changes_with, failed_model
from oomguard.errors import SettingError
from oomguard.facts import FactValue
from oomguard.incident import Incident, Patch, SettingInForce
from oomguard.surfaces import flag_words, surface


@dataclass(frozen=True, slots=True)
class Launch:
    """What is started: the command, and environment variables on top of the inherited ones.

    ``engine_version`` is that of the engine it starts, once it is known: flags are spelled as that version has them.
    ``engine_models`` are the models whose engines failed in it, as they printed them: in a program that starts several
    engines, those of other models are not changed. It is empty where none was printed. ``engine_changes`` are the settings of
    each engine that failed, where a program starts several.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    engine_version: str | None = None
    engine_models: tuple[str, ...] = ()
    engine_changes: tuple[EngineChange, ...] = ()

    def shell(self) -> str:
        """Return the launch as a line to paste into a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def with_failed_engine(launch: Launch, incident: Incident) -> Launch:
    """Return the launch with what the engine that failed in it printed of itself: its version, and its model."""
    # One engine that did not print its model, and the change may be for it.
    model = failed_model(incident)
    models = () if model is None else tuple(dict.fromkeys((*launch.engine_models, model)))
    return replace(launch, engine_version=incident.framework_version or launch.engine_version, engine_models=models)


def with_change(
    launch: Launch, incident: Incident, started: Sequence[StartedEngine], patches: Sequence[Patch]
) -> Launch:
    """Return the launch with patches for the engine that failed; those of other engines stay theirs."""
    new = {patch.setting: patch.new for patch in patches if patch.new is not None}
    changes = changes_with(launch.engine_changes, incident, started, new) if new else launch.engine_changes
    return replace(launch, engine_changes=changes)


def without_changes(launch: Launch, names: Collection[str]) -> Launch:
    """Return the launch with these settings changed for no engine."""
    left = (
        replace(change, settings={name: value for name, value in change.settings.items() if name not in names})
        for change in launch.engine_changes
    )
    return replace(launch, engine_changes=tuple(change for change in left if change.settings))


def settings_given(words: Sequence[str], engine: str, *, own: bool = False) -> dict[str, SettingInForce]:
    """Return the settings that a command's flags give an engine; of a repeated flag the last one, as argparse has it.

    ``own`` says that the words go to the engine's own parser.
    """
    found: dict[str, SettingInForce] = {}
    objects: dict[str, list[tuple[tuple[str, ...], str]]] = {}
    for flag in flags_in(words, engine, own=own):
        if flag.keys:
            if flag.text is not None:
                objects.setdefault(flag.name, []).append((flag.keys, flag.text))
            continue
        found[flag.name] = SettingInForce(flag.name, value_of(flag, engine), True, "command")
    for name, parts in objects.items():  # the parser puts the object behind all that was given whole
        found[name] = SettingInForce(name, merged_object(parts), True, "command")
    return found


def value_of(flag: Flag, engine: str) -> FactValue | None:
    """Return a flag's value as ours; None for one that only the shell knows, and for one that the engine is to find itself."""
    own = surface(flag.name, engine)
    if flag.text is None:
        return flag.on
    if isinstance(flag.text, Unread) or flag.text.strip().lower() in own.automatic:
        return None
    try:
        return own.ours(flag.name, flag.text)
    except SettingError:
        return flag.text  # a form that only the engine reads


def with_flag(launch: Launch, name: str, value: FactValue, engine: str) -> Launch:
    """Return the launch with one flag changed in its place; its other spellings go, a new flag stands at the end.

    Raises:
        KeyError: where the engine has no flag for the setting.
    """
    edits = flag_edits(launch.argv, name, value, engine, launch.engine_version)
    return replace(launch, argv=replaced(launch.argv, edits))


def flag_edits(
    words: Sequence[str],
    name: str,
    value: FactValue,
    engine: str,
    version: str | None = None,
    *,
    own: bool = False,
    at_end: bool = False,
) -> list[Edit]:
    """Return how the words of a command change where one flag does: the last one that gives it in its place, the others go.

    Args:
        words: the command.
        name: the setting.
        value: its new value.
        engine: whose flag it is.
        version: the engine's version, which spells the flag.
        own: whether the words go to the engine's own parser.
        at_end: put the flag behind all other words, since some of them are not known and may hold it too.

    Raises:
        KeyError: where the engine has no flag for the setting.
    """
    new = flag_words(name, value, engine, version)
    if new is None:
        raise KeyError(name)
    flags = [flag for flag in flags_in(words, engine, own=own) if flag.name == name and not flag.is_inside]
    edits = [Edit(flag.start, flag.end, ()) for flag in flags]
    if at_end or not edits:
        return [*edits, Edit(len(words), len(words), tuple(new))]
    return [*edits[:-1], replace(edits[-1], words=tuple(new))]
