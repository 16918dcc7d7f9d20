"""A command line as data: which settings its flags give, and the same command with a setting changed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from oomguard.errors import SettingError
from oomguard.facts import FactValue
from oomguard.incident import Incident, SettingInForce
from oomguard.settings import value_in_force
from oomguard.surfaces import flag_words, flags_in, surface


@dataclass(frozen=True, slots=True)
class Launch:
    """What is started: the command, and environment variables on top of the inherited ones.

    ``engine_version`` is that of the engine it starts, once it is known: flags are spelled as that version has them.
    ``engine_models`` are the models whose engines failed in it, as they printed them: in a program that starts several
    engines, those of other models are not changed. It is empty where none was printed.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    engine_version: str | None = None
    engine_models: tuple[str, ...] = ()

    def shell(self) -> str:
        """Return the launch as a line to paste into a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def with_failed_engine(launch: Launch, incident: Incident) -> Launch:
    """Return the launch with what the engine that failed in it printed of itself: its version, and its model."""
    known = value_in_force("model", incident.settings, incident.facts)
    # One engine that did not print its model, and the change may be for it.
    model = None if known is None or not isinstance(known[0], str) else known[0]
    models = () if model is None else tuple(dict.fromkeys((*launch.engine_models, model)))
    return replace(launch, engine_version=incident.framework_version or launch.engine_version, engine_models=models)


def settings_given(argv: tuple[str, ...], engine: str) -> dict[str, SettingInForce]:
    """Return the settings that a command's flags give an engine; of a repeated flag the last one, as argparse has it."""
    found: dict[str, SettingInForce] = {}
    for flag in flags_in(argv, engine):
        value: FactValue | None = flag.on if flag.text is None else flag.text
        if flag.text is not None:
            try:
                value = surface(flag.name, engine).ours(flag.name, flag.text)
            except SettingError:
                value = flag.text  # a form that only the engine reads: "auto", JSON
        found[flag.name] = SettingInForce(flag.name, value, True, "command")
    return found


def with_flag(launch: Launch, name: str, value: FactValue, engine: str) -> Launch:
    """Return the launch with one flag changed in its place; its other spellings go, a new flag stands at the end.

    Raises:
        KeyError: where the engine has no flag for the setting.
    """
    new = flag_words(name, value, engine, launch.engine_version)
    if new is None:
        raise KeyError(name)
    spans = [(flag.start, flag.end) for flag in flags_in(launch.argv, engine) if flag.name == name]
    argv = list(launch.argv)
    for start, end in reversed(spans[:-1]):
        del argv[start:end]
    if not spans:
        return replace(launch, argv=(*argv, *new))
    shift = sum(end - start for start, end in spans[:-1])
    start, end = spans[-1][0] - shift, spans[-1][1] - shift
    return replace(launch, argv=(*argv[:start], *new, *argv[end:]))
