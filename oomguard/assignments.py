"""``SETTING=VALUE`` as a user writes it for ``--min`` and ``--set``: numbers as the engine's command line takes them."""

from __future__ import annotations

from oomguard.errors import SettingError
from oomguard.facts import FactValue
from oomguard.settings import SETTINGS, parse_value, setting
from oomguard.surfaces import engines, grammar, suffixed, surface


def parse_assignment(text: str) -> tuple[str, FactValue]:
    """Read ``SETTING=VALUE``; raise SettingError for anything else."""
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise SettingError(f"not SETTING=VALUE: {text!r}", hint="for example max_model_len=8192")
    knob = setting(name.strip())
    return knob.name, _value(knob.name, value.strip())


def _value(name: str, text: str) -> FactValue:
    """Read ``8k`` as 8000 and ``8K`` as 8192, as the first engine does, where the engine's own value is in our unit."""
    number = None
    if SETTINGS[name].type == "int" and surface(name, "").unit_bytes == 1:
        number = suffixed(text, grammar(engines()[0]).suffixes)
    return parse_value(name, text if number is None else str(number))
