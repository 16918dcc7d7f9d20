"""A picture as SVG for a page: it loads nothing, needs no script, and follows the page's light or dark."""

from __future__ import annotations

from oomguard.report.html_parts import escaped
from oomguard.report.picture import COLORS, Label, Line, Picture, Rect


def svg(picture: Picture) -> str:
    """Return the picture as one ``svg`` element, to stand in an element of the class ``oomguard``."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" viewBox="0 0 {picture.width} {picture.height}" '
        f'width="{picture.width}" height="{picture.height}" role="img" aria-label="{escaped(picture.words)}">'
    )
    return "\n".join([head, f"<style>{_style()}</style>", *map(_shape, picture.shapes), "</svg>", ""])


def _style() -> str:
    light, dark = (
        "".join(
            f".oomguard .timeline .{use}-{name.replace(' ', '-')}{{{what}:{pair[i]}}}"
            for name, pair in COLORS.items()
            for use, what in (("f", "fill"), ("s", "stroke"))
        )
        for i in (0, 1)
    )
    text = ".oomguard .timeline text{font-family:ui-sans-serif,system-ui,sans-serif}.oomguard .timeline path{fill:none}"
    return f"{text}{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _shape(shape: Rect | Line | Label) -> str:
    name = shape.color.replace(" ", "-")
    if isinstance(shape, Label):
        place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}" font-size="{shape.size:g}"'
        return f'<text {place} class="f-{name}">{escaped(shape.text)}</text>'
    title = f"<title>{escaped(shape.title)}</title>" if shape.title else ""
    if isinstance(shape, Rect):
        place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}"'
        return f'<rect {place} class="f-{name}">{title}</rect>'
    points = "L".join(f"{x:.1f} {y:.1f}" for x, y in shape.points)
    dashes = ' stroke-dasharray="5 4"' if shape.is_dashed else ""
    return f'<path d="M{points}" class="s-{name}" stroke-width="{shape.width:g}"{dashes}>{title}</path>'
