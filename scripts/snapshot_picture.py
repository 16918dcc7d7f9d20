"""Draw docs/snapshot.svg, the memory map that docs/snapshots.md shows: that of examples/make_snapshot.py, as the HTML report has it.

python scripts/snapshot_picture.py [FILE]
"""

from __future__ import annotations

import io
import pickle
import re
import runpy
import sys
from pathlib import Path

from oomguard.diagnosing import diagnose_stream
from oomguard.report.html_style import STYLE
from oomguard.report.snapshot_html import picture

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "snapshot.svg"
_COLORS = re.compile(r"\.oomguard \.(\w+)\{--light:(#\w+);--dark:(#\w+)\}")


def drawn() -> str:
    """The picture, with the report's colours in it."""
    whole = runpy.run_path(str(ROOT / "examples" / "make_snapshot.py"))["in_pieces"]()
    snapshot = diagnose_stream(io.BytesIO(pickle.dumps(whole))).snapshot
    assert snapshot is not None
    colors = _COLORS.findall(STYLE)
    light = "".join(f".{kind}{{fill:{color}}}" for kind, color, _ in colors) + ".edge{fill:#1c1f24}"
    dark = "".join(f".{kind}{{fill:{color}}}" for kind, _, color in colors) + ".edge{fill:#e4e7ec}"
    style = f"<style>{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"
    return re.sub(r"(<svg [^>]*>)", rf"\1\n{style}", picture(snapshot.devices[0]))


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE).write_text(drawn(), encoding="utf-8")
