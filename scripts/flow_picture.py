"""Draw docs/flow.svg, the flow in one picture, from flow_picture.toml.

python scripts/flow_picture.py [--check]
"""

from __future__ import annotations

import html
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "flow.svg"
FLOW = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

WIDTH, EDGE, LINE, GAP = 600, 16, 21, 24
STYLE = """
text { font: 14px ui-sans-serif, system-ui, sans-serif; fill: #1f2328 }
.room { font-weight: 600; font-family: ui-monospace, monospace }
.path { font-family: ui-monospace, monospace; font-size: 12.5px; fill: #0a5c36 }
.new { font-size: 12.5px; fill: #0a5c36 }
.back { fill: #ffffff }
.box { fill: #f3f5f8; stroke: #c3cad3 }
.way { fill: #e8effb; stroke: #a9bfe8 }
.arrow { stroke: #6b7683; stroke-width: 1.5; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ee } .path, .new { fill: #7fd6a4 }
  .back { fill: #1b1e24 } .box { fill: #252a33; stroke: #434b57 } .way { fill: #22304a; stroke: #3d5687 }
  .arrow { stroke: #98a3b1 }
}
"""


def picture() -> str:
    """The picture as SVG."""
    parts: list[str] = []
    ways_in = FLOW["ways_in"]
    wide = (WIDTH - 2 * EDGE - (len(ways_in) - 1) * 8) / len(ways_in)
    for i, way in enumerate(ways_in):
        x = EDGE + i * (wide + 8)
        parts.append(f'<rect class="way" x="{x:.0f}" y="{EDGE}" width="{wide:.0f}" height="50" rx="6"/>')
        parts.append(_text(x + wide / 2, EDGE + 21, way["name"], "", "middle"))
        parts.append(_text(x + wide / 2, EDGE + 40, way["place"], "path", "middle"))
    y = EDGE + 50
    for step in FLOW["step"]:
        parts.append(f'<path class="arrow" d="M{WIDTH / 2:.0f} {y} v{GAP - 4} m-5 -6 l5 6 l5 -6"/>')
        y += GAP
        height = 52 + len(step["add"]) * LINE
        parts.append(f'<rect class="box" x="{EDGE}" y="{y}" width="{WIDTH - 2 * EDGE}" height="{height}" rx="6"/>')
        parts.append(_text(EDGE + 12, y + 21, step["room"], "room"))
        parts.append(_text(EDGE + 12, y + 41, step["does"]))
        for i, add in enumerate(step["add"]):
            parts.append(_text(EDGE + 12, y + 62 + i * LINE, f"+ {add['new']}", "new"))
            parts.append(_text(WIDTH - EDGE - 12, y + 62 + i * LINE, add["place"], "path", "end"))
        y += height
    height = y + EDGE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        'aria-label="The flow from what is observed to what is shown, and where each new thing is added">'
    )
    back = f'<rect class="back" width="{WIDTH}" height="{height}" rx="8"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", back, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    kinds = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.0f}" y="{y}"{kinds} text-anchor="{anchor}">{html.escape(text)}</text>'


def main() -> int:
    """Write the picture, or say whether it is up to date."""
    if "--check" in sys.argv[1:]:
        return int(PICTURE.read_text(encoding="utf-8") != picture())
    PICTURE.write_text(picture(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
