"""What a server's /metrics says of its engines: requests in a step, and what changes when the scheduler takes one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

# A row of the Prometheus text format 0.0.4: name, labels, value; a time may follow.
_ROW: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class Counters:
    """One engine behind the server.

    Attributes:
        running: requests in a step, as it last counted; None where that is not printed.
        sleeps: whether it was told to sleep, and takes no step.
        progress: what changes when the scheduler takes a step, by name and labels.
    """

    running: float | None = None
    sleeps: bool = False
    progress: dict[str, float] = field(default_factory=dict)


def read_counters(text: str, names: Mapping[str, Any]) -> dict[str, Counters]:
    """Return the counters of each engine by its label, "" where it has none; empty where the text is another server's."""
    found: dict[str, Counters] = {}
    progress, awake = frozenset(names["progress"]), names["awake"]
    for name, labels, value in _ROW.findall(text):
        is_awake = name == awake["name"]
        if name not in progress and not is_awake and name != names["running"]:
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        given = dict(_LABEL.findall(labels))
        engine = found.setdefault(given.get(names["engine_label"], ""), Counters())
        if name == names["running"]:
            engine.running = (engine.running or 0.0) + number
        if name in progress:
            engine.progress[f"{name}{{{labels}}}"] = number
        elif is_awake and given.get(awake["label"]) == awake["value"]:
            engine.sleeps = number == 0
    return found
