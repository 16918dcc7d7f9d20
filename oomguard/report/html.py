"""Show a diagnosis as one self-contained HTML page, or as a fragment for a notebook cell.

The page loads nothing, escapes every text, and works without its script.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from oomguard.core.facts import Fact, format_gib
from oomguard.core.incident import (
    EMPTY,
    Action,
    Alternative,
    Budget,
    Cause,
    Diagnosis,
    EngineStart,
    Incident,
    SettingInForce,
)
from oomguard.core.measurements import DeviceMemory
from oomguard.core.presentable import drawn
from oomguard.remedy.actions import action_why, amount, ruled_out_changes
from oomguard.report.bar import contradiction, percent, segments
from oomguard.report.phrases import (
    ShownIncident,
    capacity,
    confidence,
    echoes,
    instead,
    pastes,
    place,
    settings_of_note,
    shown_once,
    start_title,
    tradeoff,
    what_died,
)
from oomguard.report.snapshot import (
    GROUP_HEADINGS,
    STACK_HEADINGS,
    group_rows,
    sentences,
    stack_rows,
    title,
)

# The JSON names of the verdicts are no words for a page.
_VERDICTS: Final = {"oom": "out of memory", "no_oom": "no out-of-memory"}
_VIEWER: Final = (
    "To see the memory over time, open the snapshot in torch's viewer: drop it on "
    "pytorch.org/memory_viz, or write a page "
    "with python -m torch.cuda._memory_viz trace_plot snapshot.pickle -o snapshot.html"
)
# Every style rule begins with ``.oomguard``, so that a notebook keeps its own look. The colors suit
# any background, of the page and of the notebook.
STYLE: Final = """
.oomguard{--line:rgba(128,128,128,.35);--soft:rgba(128,128,128,.12);--dim:.72;--good:#1f7a44;--bad:#b3261e;
line-height:1.5;overflow-wrap:anywhere}
.oomguard *{box-sizing:border-box}
.oomguard section{border:1px solid var(--line);border-left:4px solid var(--bad);border-radius:8px;
padding:1rem 1.25rem;margin:1rem 0}
.oomguard section.start,.oomguard section.attempts{border-left-color:var(--good)}
.oomguard section.quiet{border-left-color:var(--line)}
.oomguard .headline{font-size:1.25em;font-weight:650;line-height:1.3;margin:0 0 .25rem}
.oomguard .title{font-size:1.02em;font-weight:650;margin:1.25rem 0 .35rem}
.oomguard p{margin:.35rem 0}
.oomguard .dim{opacity:var(--dim);font-size:.92em}
.oomguard .bar{display:flex;height:1.75rem;border-radius:5px;overflow:hidden;background:var(--soft);margin:1rem 0 .5rem;gap:1px}
.oomguard .bar span{min-width:3px;background:var(--light)}
.oomguard .swatch{display:inline-block;width:.8em;height:.8em;border-radius:3px;background:var(--light);margin-right:.5em}
.oomguard table{border-collapse:collapse;font-size:.95em;margin:0;width:auto;border:0;text-align:left}
.oomguard th,.oomguard td{padding:.15rem 1rem .15rem 0;text-align:left;vertical-align:top;border:0;background:none;
white-space:pre-line}
.oomguard th{font-weight:600}
.oomguard td.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.oomguard .legend td{overflow-wrap:normal}
.oomguard .wide{overflow-x:auto}
.oomguard .attempts table{min-width:34rem}
.oomguard .attempts td:last-child{white-space:nowrap}
.oomguard .attempts th,.oomguard .attempts td{border-bottom:1px solid var(--line);padding:.35rem 1rem .35rem 0;overflow-wrap:normal}
.oomguard pre,.oomguard code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.9em}
.oomguard pre{background:var(--soft);color:inherit;border:0;border-radius:6px;padding:.6rem .75rem;margin:.5rem 0;
white-space:pre-wrap;overflow-wrap:anywhere}
.oomguard ol,.oomguard ul{padding-left:1.4rem;margin:.25rem 0}
.oomguard li{margin:.6rem 0}
.oomguard .paste{display:flex;gap:.5rem;align-items:flex-start;margin:.35rem 0}
.oomguard .paste code{flex:1;background:var(--soft);color:inherit;border-radius:6px;padding:.4rem .65rem;
user-select:all;white-space:pre-wrap}
.oomguard .tag{display:inline-block;border:1px solid var(--line);border-radius:999px;padding:0 .6em;font-size:.82em;white-space:nowrap}
.oomguard summary{cursor:pointer;margin-top:.9rem}
"""
DARK: Final = """
@media (prefers-color-scheme:dark){.oomguard{--good:#53c785;--bad:#f0796f}
.oomguard .bar span,.oomguard .swatch{background:var(--dark)}}
"""
PAGE_STYLE: Final = """
:root{color-scheme:light dark}
body{margin:0;background:#fff;color:#1c1f24;font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:56rem;margin:0 auto;padding:1.5rem 1.25rem 3rem}
h1{font-size:1.05rem;font-weight:600;margin:0;opacity:.75}
.oomguard button{font:inherit;font-size:.82em;padding:.35rem .7rem;border:1px solid var(--line);border-radius:6px;
background:none;color:inherit;cursor:pointer}
@media (prefers-color-scheme:dark){body{background:#14171c;color:#e4e7ec}}
@media (max-width:34rem){.oomguard .legend td:last-child{display:none}
main{padding:.75rem .6rem 2rem}.oomguard section{padding:.75rem .8rem}}
@media print{.oomguard button{display:none}.oomguard section{break-inside:avoid-page}}
"""
# The script adds the copy buttons, so that a page without scripts has no dead buttons.
SCRIPT: Final = """
for (const code of document.querySelectorAll(".paste code")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", () => navigator.clipboard.writeText(code.textContent).then(() => {
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }));
  if (navigator.clipboard) code.parentNode.append(button);
}
"""


def to_html(
    diagnosis: Diagnosis,
    *more: Diagnosis,
    table: Sequence[Sequence[str]] | None = None,
    sentence: str | None = None,
) -> str:
    """Return the page of one diagnosis or several.

    Args:
        diagnosis: the first diagnosis, whose source is the page's title.
        more: further diagnoses, in order.
        table: the table of attempts, headings first; None for no table.
        sentence: the sentence about reduced settings below the table; None for none.
    """
    body = []
    for shown in drawn([diagnosis, *more]):
        if shown.source:
            title = f"oomguard: {shown.source}"
        else:
            title = "oomguard"
        body.append(_element("h1", f"{title}: {_VERDICTS[shown.verdict]}"))
        body += _diagnosis_sections(shown, level=2)
    if table is not None or sentence is not None:
        body.append(_attempts_section(drawn(list(table or ())), drawn(sentence or ""), level=2))
    name = drawn(diagnosis.source)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # A stranger may have written the log, so the page must not load or run anything else.
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">\n'
        f"<title>{_escaped(f'{name} - oomguard' if name else 'oomguard')}</title>\n"
        f"<style>{STYLE}{DARK}{PAGE_STYLE}</style>\n</head>\n"
        "<body>\n<main "
        f'class="oomguard">\n{"".join(body)}</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


def _policy() -> str:
    """Return the content policy: own styles and own script only, and nothing to load."""
    # The hash permits exactly our script; 'unsafe-inline' would also permit a script in a log.
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def notebook_html(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as a fragment that loads and runs nothing.

    Its styles do not affect anything outside it.
    """
    shown = drawn(diagnosis)
    if shown.source:
        source = _element("p", shown.source, "dim")
    else:
        source = ""
    return (
        f'<div class="oomguard">\n<style>{STYLE}{DARK}</style>\n{source}'
        f"{''.join(_diagnosis_sections(shown, level=3))}</div>\n"
    )


def _escaped(text: object) -> str:
    """Escape a text for an element or a quoted attribute."""
    # Attributes use this function too, and a quote would end them.
    return html.escape(str(text), quote=True)


def _element(tag: str, text: object, name: str = "") -> str:
    """Return an element with only text, of the CSS class ``name``."""
    return f"{_opening(tag, name)}{_escaped(text)}</{tag}>\n"


def _opening(tag: str, name: str = "") -> str:
    """Return the opening tag of an element of the CSS class ``name``."""
    if name:
        return f'<{tag} class="{name}">'
    return f"<{tag}>"


def _arrows(text: str) -> str:
    """Escape a text, and replace ``->`` by an arrow that no browser breaks in two."""
    return _escaped(text.replace("->", "\N{RIGHTWARDS ARROW}"))


def _diagnosis_sections(diagnosis: Diagnosis, *, level: int) -> list[str]:
    """Return one section for each incident (or start) and each device of a snapshot.

    ``level`` is the level of its headings (1 to 6).
    """
    sections = [_incident(shown, level) for shown in shown_once(diagnosis)]
    # A log without a failure still has starts to show.
    if not sections:
        found = _element(f"h{level}", diagnosis.without_failure, "headline")
        sections = [f'<section class="quiet">\n{found}</section>\n']
        sections += [_start(start, level) for start in diagnosis.starts]
    if diagnosis.snapshot is not None:
        sections += [_snapshot(device, level) for device in diagnosis.snapshot.devices]
    for note in diagnosis.notes:
        # The headline already says that the input is empty.
        if note != EMPTY:
            sections.append(_element("p", f"note: {note}", "dim"))
    return sections


def _attempts_section(table: Sequence[Sequence[str]], sentence: str, *, level: int) -> str:
    """Return the section of attempts: the table with its headings, and the sentence."""
    rows = ""
    if table:
        head = "".join(f'<th scope="col">{_arrows(cell)}</th>' for cell in table[0])
        body = ""
        for row in table[1:]:
            cells = "".join(f"<td>{_arrows(text)}</td>" for text in row)
            body += f"<tr>{cells}</tr>\n"
        rows = f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'
    title = _element(f"h{level}", "What oomguard did", "headline")
    if sentence:
        words = _element("p", sentence)
    else:
        words = ""
    return f"{_opening('section', 'attempts')}\n{title}{rows}{words}</section>\n"


def _incident(shown: ShownIncident, level: int) -> str:
    incident = shown.incident
    title = f"h{level + 1}"
    parts = [_element(f"h{level}", what_died(incident), "headline")]
    parts.append(
        f'<p class="dim"><code>{_escaped(incident.kind)}</code> {_escaped(place(incident))}</p>\n'
    )
    if text := echoes(shown):
        parts.append(_element("p", text, "dim"))
    if incident.actions:
        items = "".join(map(_action, incident.actions))
        parts.append(f"{_element(title, 'What to do', 'title')}<ol>\n{items}</ol>\n")
    for number, cause in enumerate(incident.causes):
        parts.append(_cause(cause, title, first=number == 0))
    parts.append(_bar(incident.budget))
    if ruled_out := ruled_out_changes(incident):
        items = "".join(_element("li", text) for text in ruled_out)
        parts.append(f"{_element(title, 'Not changed', 'title')}<ul>\n{items}</ul>\n")
    if incident.alternatives:
        items = "".join(map(_alternative, incident.alternatives))
        parts.append(f"{_element(title, 'Instead', 'title')}<ul>\n{items}</ul>\n")
    if incident.unknown:
        items = "".join(_element("li", text) for text in incident.unknown)
        parts.append(f"{_element(title, 'Unknown', 'title')}<ul>\n{items}</ul>\n")
    if incident.missing:
        decides = (
            f"{_element('p', incident.missing.what)}{_element('pre', incident.missing.command)}"
        )
        parts.append(f"{_element(title, 'To decide', 'title')}\n{decides}")
    parts += [_evidence(incident), _facts(incident.facts), _settings(incident.settings)]
    return (
        f"{_opening('section', '' if incident.is_oom else 'quiet')}\n{''.join(parts)}</section>\n"
    )


def _start(start: EngineStart, level: int) -> str:
    parts = [_element(f"h{level}", start_title(start), "headline"), _bar(start.budget)]
    if text := capacity(start):
        parts.append(_element("p", text))
    if rows := settings_of_note(start):
        parts += [_element(f"h{level + 1}", "Settings", "title"), _table(rows)]
    parts.append(_facts(start.facts))
    return f"{_opening('section', 'start')}\n{''.join(parts)}</section>\n"


def _snapshot(device: DeviceMemory, level: int) -> str:
    """Return the section of one device of a snapshot."""
    heading = f"h{level + 1}"
    parts = [
        _element(f"h{level}", title(device), "headline"),
        *(_element("p", text) for text in sentences(device)),
    ]
    parts.append(_element("p", _VIEWER, "dim"))
    if device.stacks:
        rows = _number_table(STACK_HEADINGS, stack_rows(device), numbers={0, 1, 2})
        parts += [_element(heading, "Who allocated it", "title"), rows]
    if device.groups:
        rows = _number_table(GROUP_HEADINGS, group_rows(device), numbers={1, 2, 3, 4, 5})
        parts += [_element(heading, "Segments", "title"), rows]
    if device.refusal is None:
        kind = "start"
    else:
        kind = ""
    return f'<section class="{kind} snapshot">\n{"".join(parts)}</section>\n'


def _number_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[int]
) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        cells = ""
        for number, text in enumerate(row):
            if number in numbers:
                cells += f'<{tag} class="number">{_escaped(text)}</{tag}>'
            else:
                cells += f"<{tag}>{_escaped(text)}</{tag}>"
        return cells

    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    head = f"<thead><tr>{cells('th', headings)}</tr></thead>"
    return f'<div class="wide"><table>\n{head}\n<tbody>\n{body}</tbody></table></div>\n'


def _bar(budget: Budget) -> str:
    """Return the bar with its legend; only the legend if the device's size is unknown."""
    parts = segments(budget)
    total = budget.device_total_bytes
    if budget.conflict:
        conflict = _element("p", contradiction(budget))
    else:
        conflict = ""
    if not parts:
        return conflict
    drawing = ""
    if total:
        # A screen reader reads these words instead of the drawing.
        words = ", ".join(f"{part.name} {percent(part.ratio)}" for part in parts)
        spans = ""
        for part in parts:
            spans += (
                f'<span style="flex:{part.ratio:.5f} 1 '
                f'0;--light:{part.color[1]};--dark:{part.color[2]}" '
                f'title="{_escaped(part.name)} {format_gib(part.bytes)}"></span>'
            )
        label = _escaped(f"{format_gib(total)} on the device: {words}")
        drawing = f'<div class="bar" role="img" aria-label="{label}">{spans}</div>\n'
    rows = "".join(
        '<tr><td><span class="swatch" '
        f'style="--light:{part.color[1]};--dark:{part.color[2]}"></span>'
        f'{_escaped(part.name)}</td><td class="number">{format_gib(part.bytes)}</td>'
        f'<td class="number">{_escaped(percent(part.ratio)) if total else ""}</td>'
        f'<td class="dim">{_escaped(part.source)}</td></tr>\n'
        for part in parts
    )
    whole = ""
    if total:
        whole = _element("p", f"of {format_gib(total)}", "dim")
    return f"{drawing}{_opening('table', 'legend')}\n{rows}</table>\n{whole}{conflict}"


def _cause(cause: Cause, title: str, *, first: bool) -> str:
    name = f"{cause.id}, {confidence(cause.confidence)}, {cause.rule or 'no rule'}"
    lines = list(map(str, cause.evidence))
    parts = [
        _element(title, f"{'Why' if first else 'Or'}: {cause.title}", "title"),
        _element("p", cause.explanation),
        _element("p", name, "dim"),
        _element("pre", "\n".join(lines)) if lines else "",
    ]
    return "".join(parts)


def _action(action: Action) -> str:
    if action.effect is None:
        tag = ""
    else:
        tag = f' <span class="tag">{_escaped(action.effect)}</span>'
    parts = [f"<li><strong>{_escaped(action.title)}</strong>{tag}\n"]
    if why := action_why(action):
        parts.append(_element("p", why))
    if action.cost:
        parts.append(_element("p", f"Cost: {action.cost}", "dim"))
    if action.blocked_by:
        parts.append(_element("p", f"oomguard run needs permission: {action.blocked_by}", "dim"))
    if action.command:
        parts.append(f'<div class="paste"><code>{_escaped(action.command)}</code></div>\n')
    return f"{''.join(parts)}</li>\n"


def _alternative(alternative: Alternative) -> str:
    cost = tradeoff(alternative)
    parts = [
        (
            f"<li><strong>{_escaped(instead(alternative))}</strong> "
            f"({_escaped(alternative.why_not)})\n"
        ),
        _element("p", f"Cost: {cost}", "dim") if cost else "",
        _pastes(alternative),
    ]
    return f"{''.join(parts)}</li>\n"


def _pastes(item: Alternative) -> str:
    lines = ""
    for text in pastes(item):
        lines += f'<div class="paste"><code>{_escaped(text)}</code></div>\n'
    return lines


def _evidence(incident: Incident) -> str:
    lines = list(map(str, (*incident.evidence, *incident.wrappers)))
    if lines:
        return _details(f"Lines of the log ({len(lines)})", _element("pre", "\n".join(lines)))
    return ""


def _facts(facts: Mapping[str, Fact]) -> str:
    if not facts:
        return ""
    rows = []
    for name, fact in sorted(facts.items()):
        rows.append(
            (
                name,
                amount(name, fact.value),
                fact.source + ("" if fact.line is None else f", line {fact.line}"),
            )
        )
    return _details(f"Numbers ({len(rows)})", _table(rows))


def _settings(settings: Mapping[str, SettingInForce]) -> str:
    if not settings:
        return ""
    whose = {True: "set by the user", False: "default", None: ""}
    rows = []
    for name, row in sorted(settings.items()):
        rows.append((name, str(row.value), whose[row.set_by_user]))
    return _details(f"Effective settings ({len(rows)})", _table(rows))


def _details(summary: str, inside: str) -> str:
    # These tables are long and few readers need them, so they start closed.
    return f"<details>{_element('summary', summary)}{inside}</details>\n"


def _table(rows: Iterable[Sequence[str]]) -> str:
    body = "".join(map(_row, rows))
    return f'<div class="wide"><table>\n{body}</table></div>\n'


def _row(row: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>\n"
