"""Print a diagnosis: the panels of its failures, of its starts and of a snapshot."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from oomguard.core.errors import SettingError
from oomguard.core.facts import MIB, Fact, parse_size
from oomguard.core.incident import (
    EMPTY,
    Action,
    Cause,
    Diagnosis,
    EngineStart,
    Evidence,
    Incident,
    facts_of_headline,
)
from oomguard.core.presentable import drawn, engine, plain
from oomguard.core.redact import homes_kept, mask
from oomguard.diagnosis import changed_command
from oomguard.remedy.actions import ruled_out_changes
from oomguard.report.bar import GRAY, GREEN, RED, BudgetBar, contradiction, has_colors
from oomguard.report.phrases import (
    ShownIncident,
    capacity,
    decide_by,
    echoes,
    framework_name,
    instead,
    pastes,
    percent_sure,
    settings_of_note,
    shortened,
    shown_causes,
    shown_once,
    start_title,
    tradeoff,
    what_died,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from oomguard.core.measurements import Snapshot


# The panel of one failure.
#
# The panel has no frame, so that a command can be copied as it is. Each line is a heading or has a
# margin of two columns; ``scan`` recognizes a panel in a log by this form.

Commands = Mapping[str, str]

# The lines of a panel at 80 columns. Other options give way first.
MOST_LINES: Final = 24
_COLUMNS: Final = 80
_BLANK_LINES: Final = 3
# With fewer options than this, the explanation is shortened instead.
_LEAST_OPTIONS: Final = 2
_MOST_OPTIONS: Final = 4
_MARGIN: Final = "  "
# The characters of the paragraph that says why: as a rule, and in a panel that is too long.
_WHY_CHARS: Final = 260
_SHORT_WHY_CHARS: Final = 120
# The commands end here, so that the effects behind them form a column.
_LEFT_COLUMNS: Final = 56
# Longer commands leave no room for their effect, so the title is shown.
_COMMAND_COLUMNS: Final = 48
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+")
# A sentence that continues the one before it.
_CONTINUES: Final = re.compile(r"(?:Most of )?(?:that|this|it|those|these|they)\b", re.IGNORECASE)
# A figure of a log line, with its unit if it has one.
_FIGURE: Final = re.compile(
    r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:\s?(?:[KMGT]i?B|bytes)\b)?", re.IGNORECASE
)
# Names of the source of a wording, not of a program.
_NO_PROGRAM: Final = frozenset({"any", "host"})
_DOTS: Final = "..."
# Printed figures are rounded.
_SAME_RATIO: Final = 1e-3


class PanelOptions(NamedTuple):
    """Hold how to write a panel.

    Attributes:
        width: columns of the console.
        source: the input's name; "" for a text.
        full: whether to shorten nothing and leave out nothing, as with ``--verbose``.
        commands: the whole changed command by setting; empty if no command is known.
        command: the command that started the engine, if the log shows it; "" otherwise.
        is_run: whether oomguard ran the command itself, so that its permissions matter.
        colored: whether the console has at least 256 colors.
        ascii_only: whether the console has ASCII alone.
    """

    width: int
    source: str = ""
    full: bool = False
    commands: Commands | None = None
    command: str = ""
    is_run: bool = False
    colored: bool = False
    ascii_only: bool = False

    def style(self, color: str, emphasis: str = "") -> str:
        """Return a style with a color, if the console shows it exactly."""
        if self.colored:
            return f"{emphasis} {color}".strip()
        return emphasis


def panel(shown: ShownIncident, options: PanelOptions) -> list[RenderableType]:
    """Return the lines of a panel; its texts must be printable (``drawn``).

    Args:
        shown: the failure.
        options: how to write it.
    """
    from rich.text import Text

    incident = shown.incident
    blank = Text()
    head = [*_what_died(incident, options), *_do_this(incident, options)]
    why = _why(incident, options, _WHY_CHARS)
    evidence, bar = _evidence(shown, options), _bar(incident, options)
    foot = _foot(incident, options)
    is_limited = options.width >= _COLUMNS and not options.full
    left = MOST_LINES - len(head) - len(evidence) - len(bar) - len(foot) - _BLANK_LINES
    # Options help more than a long explanation, which `explain` has in full.
    if is_limited and left - len(why) < _LEAST_OPTIONS + 2:
        why = _why(incident, options, _SHORT_WHY_CHARS)
    room = None
    if not options.full:
        room = _MOST_OPTIONS
    # The heading of the options and the count of the others take a line each.
    if is_limited:
        room = min(_MOST_OPTIONS, max(1, left - len(why) - 2))
    others = _other_options(incident, options, room)
    lines: list[RenderableType] = [*head]
    for section in (why, others, evidence):
        if section:
            lines += [blank, *section]
    # The bar gets a blank line if it leaves the panel short. The foot, which begins with a bold
    # heading, needs none.
    if bar and len(lines) + len(bar) + len(foot) < MOST_LINES:
        lines.append(blank)
    return [*lines, *bar, *foot]


def _hung(text: str, options: PanelOptions, *, first: str = "", rest: str = _MARGIN) -> list[Text]:
    """Return a text wrapped to the console's width, with the margins of its lines."""
    from rich.text import Text

    wrapped = textwrap.wrap(
        text,
        max(options.width, len(rest) + 4),
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
    )
    return list(map(Text, wrapped))


def _headed(name: str, text: str, options: PanelOptions, color: str = "") -> list[Text]:
    """Return a wrapped text that begins with a bold heading."""
    lines = _hung(f"{name}: {text}", options)
    lines[0].stylize(options.style(color, "bold"), 0, len(name) + 1)
    return lines


def _command(text: str, options: PanelOptions) -> Text:
    """Return a command on one line, however long, so that it can be copied."""
    from rich.text import Text

    return Text(f"{_MARGIN}{text}", style=options.style(GREEN, "bold"), no_wrap=True)


def _what_died(incident: Incident, options: PanelOptions) -> list[Text]:
    rule = incident.causes[0].rule if incident.causes else ""
    lines = _hung(f"oomguard[{rule or incident.kind}]: {what_died(incident)}", options)
    for line in lines:
        line.stylize(options.style(RED, "bold"))
    return lines


def _do_this(incident: Incident, options: PanelOptions) -> list[Text]:
    """Return the first action with the text to paste, and its cost."""
    # An event that is no failure has no action.
    if not incident.actions:
        return []
    action = incident.actions[0]
    lines = _headed("Do this", _title(action), options)
    command = _pasted(action, incident, options)
    if command is not None:
        lines.append(_command(command, options))
    elif action.why:
        # Without a text to paste, the reason says which number is missing.
        lines += _hung(_sentences(action.why, _WHY_CHARS), options, first=_MARGIN)
    if action.cost:
        cost = _first_sentence(action.cost)
        lines += _hung(f"Cost: {cost[0].lower()}{cost[1:]}", options, first=_MARGIN)
    # Only run could have applied it, so only there a reason is needed.
    if options.is_run and action.blocked_by:
        lines += _hung(f"Not done: {action.blocked_by}", options, first=_MARGIN)
    return lines


def _title(action: Action) -> str:
    if action.effect is None:
        return action.title
    return f"{action.title}  [{action.effect}]"


def _pasted(action: Action, incident: Incident, options: PanelOptions) -> str | None:
    """Return the text to paste: the whole changed command, or else the flag."""
    whole = (options.commands or {}).get(action.id)
    if whole is not None:
        return whole
    patch = None
    for one in incident.plan:
        if one.setting == action.id and one.new == action.new:
            patch = one
            break
    if options.command and action.new is not None and (action.command or "").startswith("--"):
        settings = {action.id: action.new}
        for other in incident.plan:
            if patch is not None and patch.group is not None and other.group == patch.group:
                settings |= {} if other.new is None else {other.setting: other.new}
        changed = changed_command(
            options.command, settings, incident.framework, incident.framework_version
        )
        if changed is not None:
            return changed
    if patch is None or patch.as_flag is None or patch.as_flag != action.command:
        return action.command
    group = []
    for other in incident.plan:
        if patch.group is not None and other.group == patch.group and other.as_flag is not None:
            group.append(other)
    flags = " ".join(str(other.as_flag) for other in group) or patch.as_flag
    keywords = []
    for other in group or [patch]:
        if other.as_kwarg:
            keywords.append(str(other.as_kwarg))
    words = ", ".join(keywords)
    line = f"{flags}  # in Python: {words}"
    if words and len(_MARGIN + line) <= options.width:
        return line
    return flags


def _why(incident: Incident, options: PanelOptions, chars: int) -> list[Text]:
    """Return why it failed, and the second cause in one line."""
    lines: list[Text] = []
    causes = shown_causes(incident)
    if options.full:
        causes = incident.causes
    for number, cause in enumerate(causes):
        if options.full:
            name = "Why" if number == 0 else "Or"
            lines += _headed(name, _full_cause(cause), options)
        elif number == 0:
            lines += _headed("Why", _short_why(cause, incident, chars), options)
        else:
            room = max(options.width, _COLUMNS) - len("Or: ") - len(f" ({cause.rule})")
            text = shortened(cause.title, room)
            lines += _headed("Or", f"{text} ({cause.rule})", options)
    if options.full and (how := decide_by(incident)):
        lines += _headed("Decide by", how, options)
    return lines


def _full_cause(cause: Cause) -> str:
    return f"{cause.title}. {cause.explanation} ({cause.id}, {cause.rule}, {percent_sure(cause)})"


def _short_why(cause: Cause, incident: Incident, chars: int) -> str:
    """Return the explanation and the reason of the value, in a few sentences.

    A first sentence whose figures are all above is left out.
    """
    sentences = _SENTENCE_END.split(cause.explanation or f"{cause.title}.")
    above = what_died(incident).replace(",", "")
    if incident.actions:
        above += f" {incident.actions[0].title}"
    figures = _FIGURE.findall(sentences[0])
    is_above = all(figure in above for figure in figures)
    if len(sentences) > 1 and figures and is_above and not _CONTINUES.match(sentences[1]):
        sentences = sentences[1:]
    text = _sentences(" ".join(sentences), chars)
    if incident.actions and incident.actions[0].new is not None:
        reason = incident.actions[0].why
    else:
        reason = ""
    if reason and len(text) + len(reason) <= chars:
        return f"{text} {reason[0].upper()}{reason[1:].rstrip('.')}."
    return text


def _sentences(text: str, chars: int) -> str:
    """Return the first sentences of a text, at least one, up to a number of characters."""
    first, *more = _SENTENCE_END.split(text)
    for sentence in more:
        if len(first) + len(sentence) + 1 > chars:
            break
        first = f"{first} {sentence}"
    return first


def _first_sentence(text: str) -> str:
    return _SENTENCE_END.split(text)[0].partition("; ")[0].rstrip(".") + "."


def _other_options(incident: Incident, options: PanelOptions, room: int | None) -> list[Text]:
    """Return the other actions and alternatives, one line each with the cost."""
    rows = list(map(_option, incident.actions[1:]))
    named = {action.id for action in incident.actions}
    for other in incident.alternatives:
        # a setting without a value or a direction is no option that a reader can choose
        is_bare = other.new is None and not options.full
        if other.setting not in named and not is_bare:
            paste = pastes(other)
            left = paste[0] if paste else instead(other)
            rows.append((left, other.why_not if options.full else "", tradeoff(other)))
    for text in ruled_out_changes(incident):
        rows.append((text, "not changed", ""))
    if not rows:
        return []
    if room is not None and len(rows) == room + 1:
        # A line for the last option instead of a line that says it is left out.
        room += 1
    shown = rows[:room]
    lines = _hung("Other options:", options)
    lines[0].stylize("bold")
    width = max(len(left) for left, _, _ in shown)
    for left, effect, cost in shown:
        lines += _option_lines(left, effect, cost, min(width, _LEFT_COLUMNS), options)
    if len(rows) > len(shown):
        more = f"{len(rows) - len(shown)} more: oomguard diagnose --verbose"
        lines += _hung(more, options, first=_MARGIN)
    return lines


def _option(action: Action) -> tuple[str, str, str]:
    """Return what to write for an action, its effect and its cost."""
    effect = ""
    if action.effect is not None:
        effect = str(action.effect)
    command = action.command
    # what only shows something, such as nvidia-smi, is not the option itself
    if command is None or len(command) > _COMMAND_COLUMNS or "; " in command:
        return action.title, effect, action.cost
    return command, effect, action.cost


def _option_lines(
    left: str, effect: str, cost: str, width: int, options: PanelOptions
) -> list[Text]:
    """Return an option on one line if it fits; the cost gives way first."""
    if cost:
        cost = _first_sentence(cost).rstrip(".")
        cost = f"{cost[0].lower()}{cost[1:]}"
    rights = [": ".join(filter(None, (effect, cost))), effect, ""]
    if options.full:
        rights = rights[:1]
    for right in rights:
        line = f"{_MARGIN}{left:<{width}}  {right}".rstrip()
        if len(line) <= options.width:
            break
    found = _hung(line, options)
    if not left[0].isupper():
        found[0].stylize(options.style(GREEN), len(_MARGIN), len(_MARGIN) + len(left))
    return found


def _evidence(shown: ShownIncident, options: PanelOptions) -> list[Text]:
    """Return the log's line with its number, and a caret under the figure that was used."""
    from rich.text import Text

    incident = shown.incident
    line, spans = _quoted(incident)
    if line is None:
        return []
    found = _place(shown, line, options)
    gutter = str(line.line or "")
    edge = f"{_MARGIN}{gutter} | "
    room = max(options.width - len(edge), 8)
    text, shift = _window(line.text, spans, room)
    found.append(Text(f"{edge}{text}", no_wrap=True))
    under = [" "] * len(text)
    cut = len(text) - len(_DOTS) if text.endswith(_DOTS) else len(text)
    for start, end in spans:
        if start >= shift and end - shift <= cut:
            under[start - shift : end - shift] = "^" * (end - start)
    if "^" in under:
        marks = "".join(under).rstrip()
        edge = f"{_MARGIN}{' ' * len(gutter)} | "
        found.append(Text(f"{edge}{marks}", style=options.style(RED, "bold"), no_wrap=True))
    for one in found:
        if not one.style:
            one.stylize(options.style(GRAY))
    return found


def _place(shown: ShownIncident, line: Evidence, options: PanelOptions) -> list[Text]:
    """Return where the line is and who printed it, on one line unless the panel is full."""
    incident = shown.incident
    place = options.source or "line"
    if line.line is not None:
        place = f"{place}{':' if options.source else ' '}{line.line}"
    phase = incident.phase.replace("_", " ").replace("kv ", "KV ")
    if incident.phase == "unknown":
        phase = ""
    about = [_program(incident), phase, incident.location.process or "", echoes(shown)]
    while any(about):
        text = f"--> {place} ({', '.join(filter(None, about))})"
        if options.full or len(_MARGIN + text) <= options.width:
            return _hung(text, options, first=_MARGIN)
        about.pop()
    return _hung(f"--> {place}", options, first=_MARGIN)


def _program(incident: Incident) -> str:
    if incident.framework in _NO_PROGRAM:
        return ""
    name = framework_name(incident.framework)
    return engine(incident).replace(incident.framework, name, 1)


def _quoted(incident: Incident) -> tuple[Evidence | None, list[tuple[int, int]]]:
    """Return the line with most figures of the headline, and where they are in it."""
    lines = [*incident.evidence]
    for cause in incident.causes[:1]:
        for one in cause.evidence:
            if one.line is not None:
                lines.append(one)
    if not lines:
        return None, []
    at = incident.location.line
    best = min(lines, key=lambda one: one.line != at)
    best_spans: list[tuple[int, int]] = []
    best_weight = 0.0
    names = facts_of_headline(incident.kind, incident.facts)
    for line in lines:
        spans = [_place_of(incident.facts[name], line.text) for name in names]
        # the first figure of the headline counts more than all others
        weight = 0.0
        for place, span in enumerate(spans):
            if span is not None:
                weight += 2.0**-place
        if weight > best_weight:
            best, best_weight = line, weight
            best_spans = list(filter(None, spans))
    return best, best_spans


def _place_of(fact: Fact, text: str) -> tuple[int, int] | None:
    """Return where a line has a fact's figure; None if it does not."""
    if isinstance(fact.value, (str, bool)):
        start = text.find(str(fact.value))
        return None if start < 0 else (start, start + len(str(fact.value)))
    for figure in _FIGURE.finditer(text):
        value = _number(figure.group())
        if value is None:
            continue
        has_unit = figure.group()[-1].isalpha()
        if fact.name.endswith("_bytes") and not has_unit and value < MIB:
            # A number of something else.
            continue
        if abs(value - fact.value) <= max(fact.slack, _SAME_RATIO * abs(fact.value)):
            return figure.span()
    return None


def _number(figure: str) -> float | None:
    try:
        if figure[-1].isalpha():
            return float(parse_size(figure.replace(",", "")).bytes)
        return float(figure.replace(",", ""))
    except (SettingError, ValueError):
        return None


# A window keeps this much space for the text around its figures.
_AROUND_CHARS: Final = 12


def _window(text: str, spans: Sequence[tuple[int, int]], room: int) -> tuple[str, int]:
    """Return the part of a line that shows most figures, and how many characters are before it."""
    if len(text) <= room:
        return text, 0
    first = 0
    if spans:
        best = 0
        seen = 0
        most = 0
        for start, own_end in sorted(spans):
            # The figures that fit into a window which begins at this one; it always has its own.
            ends = [own_end]
            for other, end in spans:
                if start <= other and end <= start + room - _AROUND_CHARS:
                    ends.append(end)
            if len(ends) > most:
                best = start
                seen = max(ends)
                most = len(ends)
        first = max(0, min(best - max(4, (room - (seen - best)) // 2), len(text) - room))
    part = text[first : first + room]
    if first:
        part = _DOTS + part[len(_DOTS) :]
    if first + room < len(text):
        part = part[: -len(_DOTS)] + _DOTS
    return part, first


def _bar(incident: Incident, options: PanelOptions) -> list[RenderableType]:
    """Return the bar as lines, so that they can be counted, and the contradiction."""
    from rich.console import Console
    from rich.text import Text

    lines: list[RenderableType] = []
    if incident.budget.parts:
        colors: Literal["256"] | None = None
        if options.colored:
            colors = "256"
        width = max(options.width - len(_MARGIN), 1)
        console = Console(width=width, color_system=colors, no_color=not options.colored)
        bar = BudgetBar(incident.budget, ascii_only=options.ascii_only)
        for line in bar.__rich_console__(console, console.options):
            if isinstance(line, Text) and len(line) > width:
                lines += _hung(line.plain, options, first=_MARGIN)
            elif isinstance(line, Text):
                lines.append(Text.assemble(_MARGIN, line))
    if text := contradiction(incident.budget):
        lines += _hung(text, options, first=_MARGIN)
    return lines


def _foot(incident: Incident, options: PanelOptions) -> list[Text]:
    """Return how to find an open cause, and where to read more."""
    lines: list[Text] = []
    unknown = incident.unknown
    # A new wording is worth a line, missing numbers are not.
    if not options.full:
        unknown = unknown[: int(incident.certainty_ratio is not None)]
    if unknown:
        lines += _headed("Unknown", " ".join(unknown), options)
    missing = incident.missing
    commands = [action.command for action in incident.actions]
    if missing is not None and missing.command not in commands:
        lines += _headed("To find the cause", missing.what, options)
        lines.append(_command(missing.command, options))
    first = incident.causes[0] if incident.causes else None
    if first is not None and first.rule:
        about = ", ".join(filter(None, (incident.kind, percent_sure(first))))
        lines += _headed("More", f"oomguard explain {first.rule}  ({about})", options)
    else:
        lines += _headed("More", f"oomguard explain {incident.kind}", options)
    return lines


# With more lines the panel's first action would be too far down.
_MOST_SUMMARY_ROWS: Final = 3


def summary_lines(groups: Sequence[ShownIncident], options: PanelOptions) -> Iterable[Text]:
    """Yield the table of several failures, the one to act on first, with a line for each."""
    from rich.text import Text

    heading = f"oomguard: {len(groups)} failures, the one to act on first"
    for line in _hung(heading, options):
        line.stylize("bold")
        yield line
    rows = groups
    if not options.full and len(groups) > _MOST_SUMMARY_ROWS:
        rows = groups[: _MOST_SUMMARY_ROWS - 1]
    for number, shown in enumerate(rows, 1):
        incident = shown.incident
        at = incident.location.line
        place = "" if at is None else f"line {at}: "
        text = f"{number}. {place}{what_died(incident)}"
        if options.width >= _COLUMNS:
            text = shortened(text, options.width - len(_MARGIN))
        yield from _hung(text, options, first=_MARGIN)
    if len(rows) < len(groups):
        more = f"{len(groups) - len(rows)} more: oomguard diagnose --verbose"
        yield from _hung(more, options, first=_MARGIN)
    yield Text()


# All panels of a diagnosis.

MAX_COLUMNS: Final = 100


def print_diagnosis(
    console: Console,
    diagnosis: Diagnosis,
    commands: Commands | None = None,
    *,
    full: bool = False,
) -> None:
    """Print the failures; without any, one line and a panel for each start.

    Several failures begin with a summary, and only the first cause is printed in full.

    Args:
        console: where to print; a console without Unicode gets ASCII.
        diagnosis: the diagnosis.
        commands: the whole patched command by setting, if oomguard ran it; None otherwise.
        full: whether to print every failure, cause, option and unknown in full.
    """
    shown = drawn(diagnosis)
    with homes_kept():
        command = mask(plain(diagnosis.command))
        pasted = {setting: mask(plain(command)) for setting, command in (commands or {}).items()}
    is_unicode = (console.encoding or "").lower().startswith("utf")
    options = PanelOptions(
        min(console.width, MAX_COLUMNS),
        shown.source,
        full,
        pasted,
        command,
        is_run=commands is not None,
        colored=has_colors(console),
        ascii_only=not is_unicode,
    )
    if is_unicode:
        _print(console, shown, options)
        return
    with console.capture() as captured:
        _print(console, shown, options)
    # A log may contain any script; characters that the console cannot write are replaced.
    console.file.write(
        captured.get()
        .replace("…", "...")
        .encode(console.encoding, "replace")
        .decode(console.encoding)
    )


def _print(console: Console, diagnosis: Diagnosis, options: PanelOptions) -> None:
    groups = _first_cause_first(diagnosis)
    if len(groups) > 1:
        for line in summary_lines(groups, options):
            console.print(line, soft_wrap=True)
    for number, group in enumerate(groups if options.full else groups[:1]):
        if number:
            console.print()
        for part in panel(group, options):
            console.print(part, soft_wrap=True, highlight=False)
    if not diagnosis.incidents:
        healthy = f"{diagnosis.source or 'text'}: {diagnosis.without_failure}"
        console.print(healthy, markup=False, highlight=False, soft_wrap=True)
        for start in diagnosis.starts:
            console.print(start_panel(start, ascii_only=options.ascii_only), width=options.width)
    if diagnosis.snapshot is not None:
        _print_snapshot(console, diagnosis.snapshot, options)
    for note in diagnosis.notes:
        if note != EMPTY:
            console.print(f"note: {note}", markup=False, highlight=False)


def _print_snapshot(console: Console, snapshot: Snapshot, options: PanelOptions) -> None:
    from oomguard.report.snapshot import snapshot_panel

    for device in snapshot.devices:
        console.print(snapshot_panel(device, ascii_only=options.ascii_only), width=options.width)


def _first_cause_first(diagnosis: Diagnosis) -> list[ShownIncident]:
    """Return the failures, the one to act on first."""
    groups = shown_once(diagnosis)
    first = diagnosis.first_cause
    return sorted(groups, key=lambda group: group.incident is not first)


def start_panel(start: EngineStart, *, ascii_only: bool = False) -> RenderableType:
    """Return one engine start as a panel: settings, memory and capacity."""
    from rich.text import Text

    parts: list[RenderableType] = []
    if settings := settings_of_note(start):
        line = Text()
        for i, (name, value) in enumerate(settings):
            line.append(f"{', ' if i else ''}{name} ", style="dim").append(value)
        parts.append(line)
    if start.budget.parts:
        parts += [
            *([Text()] if parts else []),
            BudgetBar(start.budget, ascii_only=ascii_only, table=True),
        ]
    if text := contradiction(start.budget):
        parts.append(Text(text, style="yellow"))
    if text := capacity(start):
        parts += [*([Text()] if parts else []), Text(text, style="bold")]
    if not parts:
        parts.append(Text("the log shows no settings and no memory figures", style="dim"))
    return _boxed(parts, start_title(start), "green", ascii_only=ascii_only)


def _boxed(
    parts: list[RenderableType], title: str, style: str, *, ascii_only: bool
) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    if ascii_only:
        frame = box.ASCII
    else:
        frame = box.ROUNDED
    return Panel(
        Group(*parts), title=Text(title), title_align="left", border_style=style, box=frame
    )
