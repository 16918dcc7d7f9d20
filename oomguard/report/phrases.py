"""Write the short texts of every report form: places, settings, changes, costs."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from oomguard.core.facts import format_gib
from oomguard.core.incident import (
    Alternative,
    Cause,
    Diagnosis,
    EngineStart,
    Incident,
    Patch,
)
from oomguard.core.presentable import engine
from oomguard.core.settings import SETTING_FACTS
from oomguard.remedy.actions import amount

# A log of many workers would fill the line with their names.
_SHOWN_NAMES: Final = 6
# oomguard shows two causes as one decision if their confidences differ by less.
CLOSE_CONFIDENCE: Final = 0.1
# A second cause that is less likely than this would only distract.
LIKELY_CONFIDENCE: Final = 0.4
# Facts of a start that identify the model and how it ran; effective settings follow them.
_NOTED_FACTS: Final = (
    "model",
    "dtype",
    "tensor_parallel_size",
    "gpu_memory_utilization_ratio",
    "max_model_len_tokens",
)


class ShownIncident(NamedTuple):
    """Hold an incident that is shown once for ``repeated`` prints in ``starts``.

    ``starts`` is empty if the input has only one start.
    """

    incident: Incident
    starts: tuple[int, ...] = ()
    repeated: int = 1


def shown_once(diagnosis: Diagnosis) -> list[ShownIncident]:
    """Return the incidents in order, merged if they differ only in place and start."""
    groups: dict[tuple[object, ...], list[Incident]] = {}
    for incident in diagnosis.incidents:
        groups.setdefault(_sameness(incident), []).append(incident)
    shown = []
    for same in groups.values():
        starts = tuple(dict.fromkeys(incident.start for incident in same))
        # A log of one start does not number its start.
        if max(starts) <= 1:
            starts = ()
        repeated = sum(incident.repeated for incident in same)
        shown.append(ShownIncident(same[0], starts, repeated))
    return shown


def _sameness(incident: Incident) -> tuple[object, ...]:
    causes = []
    for cause in incident.causes:
        causes.append((cause.id, cause.rule, cause.confidence, cause.explanation))
    actions = []
    for a in incident.actions:
        actions.append((a.id, str(a.old), str(a.new), a.title, a.why, a.blocked_by))
    return (
        incident.kind,
        incident.framework,
        incident.framework_version,
        incident.phase,
        incident.headline,
        tuple(sorted((name, str(fact.value)) for name, fact in incident.facts.items())),
        tuple(causes),
        tuple(actions),
        incident.alternatives,
        incident.budget,
        incident.unknown,
    )


# The first line of each kind of failure is data: a new engine needs only a new row.
_FIRST_LINE: Final = Path(__file__).with_name("first_line.toml")
# A message may be a page long.
_MESSAGE_CHARS: Final = 120
# A word such as "One", whose first letter is small inside a sentence; "CUDA" and "vLLM" stay.
_WORD: Final = re.compile(r"[A-Z][a-z]*\b")


@cache
def _first_line() -> dict[str, Any]:
    return tomllib.loads(_FIRST_LINE.read_text(encoding="utf-8"))


def framework_name(framework: str) -> str:
    """Return a framework's name as its project writes it."""
    return str(_first_line()["names"].get(framework, framework))


def what_died(incident: Incident) -> str:
    """Return one sentence: which program failed at what, with the figures.

    >>> what_died(oomguard.diagnose(path="error.log").first_cause)
    'vLLM could not start: no memory is left for the KV cache'
    """
    table = _first_line()
    row = next(row for row in table["begins"] if _fits(row, incident, table["engines"]["names"]))
    engine_name = framework_name(incident.framework)
    begins = row["text"].format(engine=engine_name)
    figures = incident.headline
    # An unknown wording has no headline, so the message itself is shown.
    if incident.kind == "other":
        figures = shortened(incident.message, _MESSAGE_CHARS)
    if not begins:
        return figures
    if incident.kind != "other":
        # The sentence has one colon, after the program.
        figures = figures.replace(": ", ", ", 1)
    if _WORD.match(figures):
        figures = figures[0].lower() + figures[1:]
    if figures.startswith(f"{engine_name} "):
        figures = f"it{figures.removeprefix(engine_name)}"
    return f"{begins}: {figures}"


def shortened(text: str, chars: int) -> str:
    """Return a text on one line, cut at a word after ``chars`` characters at most."""
    words = " ".join(text.split())
    if len(words) <= chars:
        return words
    return f"{words[: chars - 3].rpartition(' ')[0] or words[: chars - 3]}..."


def _fits(row: Mapping[str, Any], incident: Incident, engines: Sequence[str]) -> bool:
    return (
        incident.kind in row.get("kinds", (incident.kind,))
        and incident.phase in row.get("phases", (incident.phase,))
        and row.get("at_start", incident.is_at_start) == incident.is_at_start
        and (not row.get("engines", False) or incident.framework in engines)
    )


def place(incident: Incident, source: str = "") -> str:
    """Return framework, phase, process and line, as far as they are known."""
    if incident.location.line is None:
        line = None
    else:
        line = f"{source + ' ' if source else ''}line {incident.location.line}"
    if incident.phase == "unknown":
        phase = ""
    else:
        phase = incident.phase.replace("_", " ")
    return ", ".join(filter(None, (engine(incident), phase, incident.location.process, line)))


def echoes(shown: ShownIncident) -> str:
    """Return how often, and in which starts and processes, the failure was printed.

    "" if it was printed once.
    """
    incident = shown.incident
    texts = []
    if shown.repeated > 1:
        texts.append(f"printed {shown.repeated} times")
    if shown.starts:
        starts = list(map(str, shown.starts))
        texts.append(f"start {starts[0]}" if len(starts) == 1 else f"starts {_listed(starts)}")
    if incident.also_in:
        texts.append(f"also in {_listed(incident.also_in)}")
    lines = []
    for line in incident.wrappers:
        if line.line is not None:
            lines.append(str(line.line))
    if lines:
        texts.append(f"passed on at {'line' if len(lines) == 1 else 'lines'} {_listed(lines)}")
    elif incident.wrappers:
        texts.append("passed on by a parent process")
    return "; ".join(texts)


def _listed(names: Sequence[str]) -> str:
    if len(names) > _SHOWN_NAMES:
        more = f" and {len(names) - _SHOWN_NAMES} more"
    else:
        more = ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def change_text(patch: Patch) -> str:
    """Return a change such as ``40960 -> 26624``.

    An unknown old value is left out; an unknown new value is ``not solved``.
    """
    if patch.new is None:
        new = "not solved"
    else:
        new = amount(patch.setting, patch.new)
    if patch.old is None:
        return new
    return f"{amount(patch.setting, patch.old)} -> {new}"


def instead(alternative: Alternative) -> str:
    """Return ``max_num_seqs = 8``, or the setting alone if no value is known."""
    name = alternative.setting
    value = alternative.new
    if value is None:
        return name
    return f"{name} = {amount(name, value)}"


def why(patch: Patch) -> str:
    """Return the reason of a patch and the bytes that it should free."""
    freed = patch.predicted_freed_bytes or 0
    return patch.reason + (f" (frees {format_gib(freed)})" if freed > 0 else "")


def shown_causes(incident: Incident) -> tuple[Cause, ...]:
    """Return the likeliest cause, and the second if it is likely and not ``unknown``."""
    if len(incident.causes) > 1:
        second = incident.causes[1]
        if second.id != "unknown" and second.confidence >= LIKELY_CONFIDENCE:
            return incident.causes[:2]
    return incident.causes[:1]


def decide_by(incident: Incident) -> str:
    """Return how to decide between the two likeliest causes; "" if one is clearly likelier."""
    causes = shown_causes(incident)
    is_close = len(causes) > 1 and causes[0].confidence - causes[1].confidence < CLOSE_CONFIDENCE
    if is_close and causes[0].id != causes[1].id:
        return causes[0].confirm
    return ""


def pastes(item: Patch | Alternative) -> list[str]:
    """Return the texts to paste: flag, keyword argument and environment variable."""
    if item.new is None:
        return []
    return list(filter(None, (item.as_flag, item.as_kwarg, getattr(item, "as_env", None))))


def blocked(patch: Patch) -> str:
    """Return why oomguard does not apply a solved patch automatically; "" if it may."""
    if patch.blocked_by and patch.new is not None:
        return patch.blocked_by
    return ""


def tradeoff(alternative: Alternative) -> str:
    """Return the cost of an alternative; "" if unknown."""
    return str(getattr(alternative, "tradeoff", ""))


def percent_sure(cause: Cause) -> str:
    """Return a cause's confidence in words, such as ``97% sure``; "" for an unknown cause."""
    if cause.id == "unknown":
        return ""
    return f"{100 * cause.confidence:.0f}% sure"


def confidence(value: float) -> str:
    """Format a confidence (0 to 1) with two digits."""
    return f"confidence {value:.2f}"


def settings_of_note(start: EngineStart) -> list[tuple[str, str]]:
    """Return (name, value) of the model and of the user's settings, in the engine's order."""
    rows = {}
    for name in _NOTED_FACTS:
        if name in start.facts:
            rows[name] = start.facts[name].value
    for name, setting in start.settings.items():
        if setting.set_by_user is not False and setting.value is not None:
            rows.pop(SETTING_FACTS.get(name, ""), None)
            rows[name] = setting.value
    return [(name.removesuffix("_ratio"), amount(name, value)) for name, value in rows.items()]


def capacity(start: EngineStart) -> str:
    """Return how many tokens and requests fit in the KV cache; "" if unknown."""
    tokens = _number(start, "kv_cache_capacity_tokens")
    longest = _number(start, "max_model_len_tokens")
    if not tokens:
        return ""
    text = f"The KV cache holds {tokens:,.0f} tokens"
    if not longest:
        return text
    return f"{text}: {tokens / longest:.2f} requests of {longest:,.0f} tokens at once"


def _number(start: EngineStart, name: str) -> float | None:
    fact = start.facts.get(name)
    if fact is None or isinstance(fact.value, (str, bool)):
        return None
    return fact.value


def start_title(start: EngineStart) -> str:
    """Return a title such as ``start 2, vllm 0.32.0, line 14``."""
    if start.line is None:
        line = None
    else:
        line = f"line {start.line}"
    return ", ".join(filter(None, (f"start {start.number}", engine(start), line)))
