"""What a stranger's table of options may say: less than the user allows, and how the output looks; never more.

``oomguard run`` is started in folders that were cloned or downloaded. Their ``[tool.oomguard]`` must not permit a change, name a file
to write or a rule to trust, add relaunches or time, hide a message, or keep the command from running.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from oomguard.assignments import parse_assignment
from oomguard.cli.durations import seconds_in
from oomguard.errors import OomguardError, SettingError
from oomguard.facts import FactValue
from oomguard.incident import Effect
from oomguard.remedy.policy import DEFAULT_MAX_PER_HOUR, DEFAULT_MAX_RELAUNCHES, pinned_name

# From the least that may be changed to the most; None is the default: capacity only on settings that were left alone.
_ALLOWED: Final = (str(Effect.OUTPUT_PRESERVING), None, str(Effect.REDUCES_CAPACITY), str(Effect.CHANGES_OUTPUTS))
_LONGEST_S: Final = 10**9
# Times that may be shortened, each with what it is where nobody says.
_TIMES: Final = {"deadline": math.inf, "wait": 0.0}
_COUNTS: Final = {"max_relaunches": DEFAULT_MAX_RELAUNCHES, "max_per_hour": DEFAULT_MAX_PER_HOUR}
# How the output looks: the words that do no harm. A page (html) ends a --follow.
_LOOKS: Final = {
    "format": ("terminal", "json", "markdown"),
    "color": ("auto", "always", "never"),
    "log_format": ("console", "json"),
}
_MAX_ENTRIES: Final = 256
_MAX_CHARS: Final = 100  # of a name or value that is compared with known ones, or told


class Restrictions:
    """Reads one table; what it may say is in ``taken`` by option, every other option with its reason in ``left_out``."""

    def __init__(self, own: Mapping[str, Any], options: Collection[str]) -> None:
        self.taken: dict[str, Any] = {}
        self.left_out: list[tuple[str, str]] = []
        self._own, self._options = own, options

    def read(self, table: Any) -> None:
        """Take what the table may say."""
        if not isinstance(table, dict):
            self._leave("", f"it is a {type(table).__name__}, not a table")
            return
        if len(table) > _MAX_ENTRIES:
            self._leave("", f"it has more than {_MAX_ENTRIES} options")
            return
        for key, value in table.items():
            self._option(key.replace("-", "_"), value)

    def _option(self, name: str, value: Any) -> None:
        if name not in self._options:
            self._leave(name[:_MAX_CHARS], f"unknown option, {said_of_unknown(name, self._options)}")
        elif name == "allow":
            self._allow(value)
        elif name in _COUNTS or name in _TIMES:
            self._at_most(name, value)
        elif name == "restart":
            self._restart(value)
        elif name == "pin":
            self._pins(value)
        elif name == "min":
            self._floors(value)
        elif name in {"dry_run", "verbose"}:
            self._switch(name, value)
        elif name in _LOOKS:
            self._look(name, value)
        else:
            self._leave(name, f"only a flag, OOMGUARD_{name.upper()} or your own file may set it")

    def _allow(self, value: Any) -> None:
        own = self._own.get("allow")
        if value not in _ALLOWED or value is None:
            self._leave("allow", f"one of {', '.join(filter(None, _ALLOWED))}")
        elif own in _ALLOWED and _ALLOWED.index(value) > _ALLOWED.index(own):
            self._leave("allow", f"{value} allows more than {own or 'the default'}: {_who('allow')} may")
        else:
            self.taken["allow"] = value

    def _at_most(self, name: str, given: Any) -> None:
        whole = name in _COUNTS
        most = self._own.get(name, {**_COUNTS, **_TIMES}[name])
        is_short = not isinstance(given, str) or len(given) <= _MAX_CHARS
        value = seconds_in(given) if is_short and not whole else given
        if not isinstance(value, int if whole else (int, float)) or isinstance(value, bool):
            self._leave(name, "a whole number" if whole else "a time such as 30m, or a number of seconds")
        elif not 0 <= value <= _LONGEST_S:
            of = f"more than {most}: {_who(name)} may say so" if whole and value > 0 else f"between 0 and {_LONGEST_S}"
            self._leave(name, of)
        elif value > most:
            self._leave(name, f"more than {most}: {_who(name)} may say so")
        else:
            self.taken[name] = value

    def _restart(self, value: Any) -> None:
        if value == "no":
            self.taken["restart"] = value
        else:
            self._leave("restart", f"only no: {_who('restart')} may have the command run again")

    def _pins(self, value: Any) -> None:
        pins = list(self._own.get("pin", ()))
        for entry in self._entries("pin", value):
            try:
                pins.append(pinned_name(entry if isinstance(entry, str) else ""))
            except SettingError:
                self._leave("pin", f"unknown setting {_shown(entry)}")
        if pins:
            self.taken["pin"] = list(dict.fromkeys(pins))

    def _floors(self, value: Any) -> None:
        """Take the higher of two floors of one setting: the table's cannot lower the user's."""
        floors: dict[str, tuple[FactValue, str]] = {}
        given = [f"{key}={entry}" for key, entry in value.items()] if isinstance(value, dict) else value
        own = list(self._own.get("min", ()))
        for entry in [*own, *self._entries("min", given)]:
            if entry not in own and (not isinstance(entry, str) or len(entry) > _MAX_CHARS):
                self._leave("min", f"not SETTING=VALUE: {_shown(entry)}")
                continue
            try:
                name, floor = parse_assignment(entry)
            except (OomguardError, ValueError, OverflowError) as error:
                if entry in own:  # the user's own mistake is told where all of the command line is read
                    floors[entry] = (entry, entry)
                else:
                    self._leave("min", str(error))
                continue
            before = floors.get(name)
            if before is None or _is_higher(floor, before[0]):
                floors[name] = (floor, entry)
        if floors:
            self.taken["min"] = [entry for _, entry in floors.values()]

    def _switch(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            self._leave(name, "true or false")
        elif value:
            self.taken[name] = True
        elif self._own.get(name):
            self._leave(name, f"only {_who(name)} may turn it off")

    def _look(self, name: str, value: Any) -> None:
        if isinstance(value, str) and value in _LOOKS[name]:
            self.taken[name] = value
        else:
            self._leave(name, f"one of {', '.join(_LOOKS[name])}")

    def _entries(self, name: str, value: Any) -> list[Any]:
        entries = value if isinstance(value, list) else [value]
        if len(entries) > _MAX_ENTRIES:
            self._leave(name, f"more than {_MAX_ENTRIES} entries")
            return []
        return entries

    def _leave(self, name: str, why: str) -> None:
        self.left_out.append((name, why))


def said_of_unknown(name: str, options: Collection[str]) -> str:
    """Return the nearest option to an unknown name, all of them where none is near."""
    import difflib

    near = difflib.get_close_matches(name[:_MAX_CHARS], options, n=1)
    return f"did you mean {near[0]!r}?" if near else f"options: {', '.join(options)}"


def _who(name: str) -> str:
    return f"a flag, OOMGUARD_{name.upper()} or your own file"


def _is_higher(one: FactValue, other: FactValue) -> bool:
    return not isinstance(one, str) and not isinstance(other, str) and one > other


def _shown(value: Any) -> str:
    return repr(value)[:_MAX_CHARS] if isinstance(value, str) else type(value).__name__
