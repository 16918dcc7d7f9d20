"""A diagnosis as Markdown for an issue tracker."""

from __future__ import annotations

from oomguard.incident import Diagnosis, Incident
from oomguard.report.headline import headline
from oomguard.report.mask import mask


def to_markdown(diagnosis: Diagnosis) -> str:
    """The diagnosis as Markdown: headline, cause with evidence, plan as a table, what is unknown."""
    if not diagnosis.incidents:
        return f"**{diagnosis.source or 'text'}**: no memory failure found\n"
    return "\n".join(_incident(incident) for incident in diagnosis.incidents)


def _cell(text: object) -> str:
    return str(text).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _incident(incident: Incident) -> str:
    version = f" {incident.framework_version}" if incident.framework_version else ""
    lines = [
        f"### {headline(incident)}",
        "",
        f"`{incident.kind}` in {incident.framework}{version}, {incident.phase}",
        "",
    ]
    for cause in incident.causes:
        lines.append(f"**{cause.title}** (`{cause.id}`, confidence {cause.confidence:.2f}). {mask(cause.explanation)}")
        lines.append("")
    if incident.evidence:
        lines += ["```text", *(mask(str(e)).replace("```", "'''") for e in incident.evidence), "```", ""]
    if incident.plan:
        lines += ["| setting | from | to | effect | why | paste |", "|---|---|---|---|---|---|"]
        for patch in incident.plan:
            new = "not solved" if patch.new is None else patch.new
            why = patch.reason + (
                f" (not done by itself: {patch.blocked_by})" if patch.blocked_by and patch.new is not None else ""
            )
            paste = patch.as_flag or patch.as_kwarg or ""
            old = "" if patch.old is None else patch.old
            lines.append(
                f"| {patch.setting} | {_cell(old)} | {_cell(new)} | {patch.effect} | {_cell(why)} | `{_cell(paste)}` |"
            )
        lines.append("")
    lines += [f"- instead: `{a.as_flag or a.setting}` ({a.why_not})" for a in incident.alternatives]
    if incident.unknown:
        lines.append(f"- unknown: {'; '.join(incident.unknown)}")
    return "\n".join(lines) + "\n"
