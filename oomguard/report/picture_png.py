"""A picture as PNG, by matplotlib, which brings its own fonts: a server often has none."""

from __future__ import annotations

import io
from typing import Any, Final

from oomguard.errors import UsageError
from oomguard.installation import install_hint
from oomguard.report.picture import COLORS, Label, Line, Picture, Rect

_DOTS_PER_INCH: Final = 144
_POINTS_PER_PIXEL: Final = 0.72  # the picture is drawn at 100 of its pixels an inch
_ANCHORS: Final = {"start": "left", "middle": "center", "end": "right"}


def png(picture: Picture) -> bytes:
    """Return the picture; raises UsageError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        hint = f'{install_hint("plots")}, or write it as a page: seen.to_html("watch.html")'
        raise UsageError("a PNG is drawn by matplotlib, which is not installed", hint=hint) from None
    figure = Figure(figsize=(picture.width / 100, picture.height / 100), dpi=_DOTS_PER_INCH)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.set_axis_off()
    for order, shape in enumerate(picture.shapes):
        _draw(axes, shape, order)
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()


def _draw(axes: Any, shape: Rect | Line | Label, order: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    color = COLORS[shape.color][0]
    if isinstance(shape, Label):
        # A dollar sign begins mathematics: a label is text.
        axes.text(
            shape.x,
            shape.y,
            shape.text,
            color=color,
            ha=_ANCHORS[shape.anchor],
            va="baseline",
            size=shape.size * _POINTS_PER_PIXEL,
            zorder=order,
            parse_math=False,
        )
    elif isinstance(shape, Rect):
        axes.add_patch(
            Rectangle((shape.x, shape.y), shape.width, shape.height, facecolor=color, linewidth=0, zorder=order)
        )
    else:
        across, down = zip(*shape.points, strict=True)
        style = (0, (5, 4)) if shape.is_dashed else "-"
        axes.add_line(
            Line2D(across, down, color=color, linewidth=shape.width * _POINTS_PER_PIXEL, linestyle=style, zorder=order)
        )
