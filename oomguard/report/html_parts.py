"""The parts of a report in HTML, for the page and the notebook, from records that are fit to show (``drawn``)."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from oomguard.facts import Fact, format_gib
from oomguard.incident import Alternative, Budget, Cause, Diagnosis, EngineStart, Incident, Patch, SettingInForce
from oomguard.report.bar import percent, segments
from oomguard.report.snapshot import GROUP_HEADINGS, STACK_HEADINGS, group_rows, sentences, stack_rows, title
from oomguard.report.wording import (
    Shown,
    amount,
    blocked,
    capacity,
    change,
    confidence,
    echoes,
    instead,
    pastes,
    place,
    settings_of_note,
    shown_once,
    start_title,
    tradeoff,
    why,
)
from oomguard.snapshots.records import DeviceMemory

_VIEWER: Final = (
    "To see the memory over time, open the snapshot in torch's viewer: drop it on pytorch.org/memory_viz, or write a page "
    "with python -m torch.cuda._memory_viz trace_plot snapshot.pickle -o snapshot.html"
)


def escaped(text: object) -> str:
    """Escape a text for an element or a quoted attribute: nothing in it is markup."""
    return html.escape(str(text), quote=True)


def element(tag: str, text: object, name: str = "") -> str:
    """Return an element of that class (``name``) that holds only text."""
    return f"{opening(tag, name)}{escaped(text)}</{tag}>\n"


def opening(tag: str, name: str = "") -> str:
    """Return the opening tag of an element of that class (``name``)."""
    return f'<{tag} class="{name}">' if name else f"<{tag}>"


def _arrows(text: str) -> str:
    """Escape a text, with arrows that no browser breaks in two."""
    return escaped(text.replace("->", "\N{RIGHTWARDS ARROW}"))


def diagnosis_sections(diagnosis: Diagnosis, *, level: int) -> list[str]:
    """Return a section for each incident, or for each healthy start, and for each device of a snapshot.

    Headings begin at ``level`` (1 to 6).
    """
    sections = [_incident(shown, level) for shown in shown_once(diagnosis)]
    if not sections:
        found = element(f"h{level}", "no memory failure found", "headline")
        sections = [f'<section class="quiet">\n{found}</section>\n']
        sections += [_start(start, level) for start in diagnosis.starts]
    if diagnosis.snapshot is not None:
        sections += [_snapshot(device, level) for device in diagnosis.snapshot.devices]
    return sections + [element("p", f"note: {note}", "dim") for note in diagnosis.notes]


def attempts_section(table: Sequence[Sequence[str]], sentence: str, *, level: int) -> str:
    """Return the section of what was tried: a table with its headings first, and what was reduced."""
    rows = ""
    if table:
        head = "".join(f'<th scope="col">{_arrows(cell)}</th>' for cell in table[0])
        body = "".join(f"<tr>{''.join(f'<td>{_arrows(text)}</td>' for text in row)}</tr>\n" for row in table[1:])
        rows = f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'
    title = element(f"h{level}", "What oomguard did", "headline")
    words = element("p", sentence) if sentence else ""
    return f"{opening('section', 'attempts')}\n{title}{rows}{words}</section>\n"


def _incident(shown: Shown, level: int) -> str:
    incident, title = shown.incident, f"h{level + 1}"
    parts = [element(f"h{level}", incident.headline, "headline")]
    parts.append(f'<p class="dim"><code>{escaped(incident.kind)}</code> {escaped(place(incident))}</p>\n')
    if text := echoes(shown):
        parts.append(element("p", text, "dim"))
    parts.append(_bar(incident.budget))
    for number, cause in enumerate(incident.causes):
        parts.append(_cause(cause, title, first=number == 0))
    if incident.plan:
        items = "".join(_patch(patch) for patch in incident.plan)
        parts.append(f"{element(title, 'What to change', 'title')}<ol>\n{items}</ol>\n")
    if incident.alternatives:
        items = "".join(_alternative(alternative) for alternative in incident.alternatives)
        parts.append(f"{element(title, 'Instead', 'title')}<ul>\n{items}</ul>\n")
    if incident.unknown:
        items = "".join(element("li", text) for text in incident.unknown)
        parts.append(f"{element(title, 'Unknown', 'title')}<ul>\n{items}</ul>\n")
    if incident.missing:
        decides = f"{element('p', incident.missing.what)}{element('pre', incident.missing.command)}"
        parts.append(f"{element(title, 'To decide', 'title')}\n{decides}")
    parts += [_evidence(incident), _facts(incident.facts), _settings(incident.settings)]
    return f"{opening('section', '' if incident.is_oom else 'quiet')}\n{''.join(parts)}</section>\n"


def _start(start: EngineStart, level: int) -> str:
    parts = [element(f"h{level}", start_title(start), "headline"), _bar(start.budget)]
    if text := capacity(start):
        parts.append(element("p", text))
    if rows := settings_of_note(start):
        parts += [element(f"h{level + 1}", "Settings", "title"), _table(rows)]
    parts.append(_facts(start.facts))
    return f"{opening('section', 'start')}\n{''.join(parts)}</section>\n"


def _snapshot(device: DeviceMemory, level: int) -> str:
    """Return the section of one device of a snapshot."""
    heading = f"h{level + 1}"
    parts = [element(f"h{level}", title(device), "headline"), *(element("p", text) for text in sentences(device))]
    parts.append(element("p", _VIEWER, "dim"))
    if device.stacks:
        rows = _number_table(STACK_HEADINGS, stack_rows(device), numbers={0, 1, 2})
        parts += [element(heading, "Who holds it", "title"), rows]
    if device.groups:
        rows = _number_table(GROUP_HEADINGS, group_rows(device), numbers={1, 2, 3, 4, 5})
        parts += [element(heading, "Segments", "title"), rows]
    kind = "start" if device.refusal is None else ""
    return f'<section class="{kind} snapshot">\n{"".join(parts)}</section>\n'


def _number_table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[int]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        names = [' class="number"' if number in numbers else "" for number in range(len(row))]
        return "".join(f"<{tag}{name}>{escaped(text)}</{tag}>" for name, text in zip(names, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    head = f"<thead><tr>{cells('th', headings)}</tr></thead>"
    return f'<div class="wide"><table>\n{head}\n<tbody>\n{body}</tbody></table></div>\n'


def _bar(budget: Budget) -> str:
    """Return the bar with its legend as a table; without the device's total only the table, without shares."""
    parts, total = segments(budget), budget.device_total_bytes
    if not parts:
        return ""
    drawing = ""
    if total:
        words = ", ".join(f"{part.name} {percent(part.ratio)}" for part in parts)
        spans = "".join(
            f'<span style="flex:{part.ratio:.5f} 1 0;--light:{part.color[1]};--dark:{part.color[2]}" '
            f'title="{escaped(part.name)} {format_gib(part.bytes)}"></span>'
            for part in parts
        )
        label = escaped(f"{format_gib(total)} on the device: {words}")
        drawing = f'<div class="bar" role="img" aria-label="{label}">{spans}</div>\n'
    rows = "".join(
        f'<tr><td><span class="swatch" style="--light:{part.color[1]};--dark:{part.color[2]}"></span>'
        f'{escaped(part.name)}</td><td class="number">{format_gib(part.bytes)}</td>'
        f'<td class="number">{escaped(percent(part.ratio)) if total else ""}</td>'
        f'<td class="dim">{escaped(part.source)}</td></tr>\n'
        for part in parts
    )
    whole = f"of {format_gib(total)}" if total else "of a device whose size is not known"
    return f"{drawing}{opening('table', 'legend')}\n{rows}</table>\n{element('p', whole, 'dim')}"


def _cause(cause: Cause, title: str, *, first: bool) -> str:
    name = f"{cause.id}, {confidence(cause.confidence)}, {cause.rule or 'no rule'}"
    lines = [str(line) for line in cause.evidence]
    parts = [
        element(title, f"{'Why' if first else 'Or'}: {cause.title}", "title"),
        element("p", cause.explanation),
        element("p", name, "dim"),
        element("pre", "\n".join(lines)) if lines else "",
    ]
    return "".join(parts)


def _patch(patch: Patch) -> str:
    name = f"<strong>{escaped(patch.setting)}: {_arrows(change(patch))}</strong>"
    tag = f'<span class="tag">{escaped(patch.effect)}</span>'
    parts = [f"<li>{name} {tag}\n", element("p", why(patch))]
    if patch.tradeoff:
        parts.append(element("p", f"Cost: {patch.tradeoff}", "dim"))
    if text := blocked(patch):
        parts.append(element("p", f"Not done by itself: {text}", "dim"))
    return f"{''.join(parts)}{_pastes(patch)}</li>\n"


def _alternative(alternative: Alternative) -> str:
    cost = tradeoff(alternative)
    parts = [
        f"<li><strong>{escaped(instead(alternative))}</strong> ({escaped(alternative.why_not)})\n",
        element("p", f"Cost: {cost}", "dim") if cost else "",
        _pastes(alternative),
    ]
    return f"{''.join(parts)}</li>\n"


def _pastes(item: Patch | Alternative) -> str:
    return "".join(f'<div class="paste"><code>{escaped(text)}</code></div>\n' for text in pastes(item))


def _evidence(incident: Incident) -> str:
    lines = [str(line) for line in (*incident.evidence, *incident.wrappers)]
    return _details(f"Lines of the log ({len(lines)})", element("pre", "\n".join(lines))) if lines else ""


def _facts(facts: Mapping[str, Fact]) -> str:
    if not facts:
        return ""
    rows = [
        (name, amount(name, fact.value), fact.source + ("" if fact.line is None else f", line {fact.line}"))
        for name, fact in sorted(facts.items())
    ]
    return _details(f"Numbers ({len(rows)})", _table(rows))


def _settings(settings: Mapping[str, SettingInForce]) -> str:
    if not settings:
        return ""
    whose = {True: "set by the user", False: "default", None: ""}
    rows = [(name, str(row.value), whose[row.set_by_user]) for name, row in sorted(settings.items())]
    return _details(f"Settings in force ({len(rows)})", _table(rows))


def _details(summary: str, inside: str) -> str:
    return f"<details>{element('summary', summary)}{inside}</details>\n"


def _table(rows: Iterable[Sequence[str]]) -> str:
    body = "".join(_row(row) for row in rows)
    return f'<div class="wide"><table>\n{body}</table></div>\n'


def _row(row: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>\n"
