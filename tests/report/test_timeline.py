"""What a watch saw, drawn: tables, CSV, the picture as SVG in a page and as PNG; an empty run, hostile labels, many calls."""

from __future__ import annotations

import csv
import io
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import pytest

from oomguard import UsageError, Watch
from oomguard.incident import Attempt
from oomguard.installation import install_hint
from oomguard.report.picture import Label, Line, Rect
from oomguard.report.picture_png import png
from oomguard.report.picture_svg import svg
from oomguard.report.timeline_csv import rows_csv, samples_csv
from oomguard.report.timeline_html import fragment, page
from oomguard.report.timeline_picture import WIDTH, timeline_picture
from oomguard.report.timeline_table import table_text
from oomguard.timeline import Counter, Mark, MemoryUse, Sample, SeenCall, TimedAttempt, Timeline

GIB = 2**30
CARD = Counter("cuda:0", "allocated")
USED = Counter("cuda:0", "in use")
USE = MemoryUse("cuda:0", "allocated", 1 * GIB, 7 * GIB, 2 * GIB, 8 * GIB)
ATTEMPTS = (
    TimedAttempt(Attempt(1, {"batch_size": 64}, error="OutOfMemoryError", seconds=1.0), 1.0, 2.0),
    TimedAttempt(Attempt(2, {"batch_size": 23}, seconds=2.0), 2.5, 4.5),
)
CALL = SeenCall("generate", "call", 1.0, 3.6, "LlamaForCausalLM", 64, 1000, 256, (USE,), ATTEMPTS)
WATCHED = Timeline(
    seconds=5.0,
    uses=(USE, MemoryUse("cuda:0", "in use", 2 * GIB, 7 * GIB, 3 * GIB, 8 * GIB, sampled=True)),
    rows=(CALL, SeenCall("save", "span", 4.7, 0.2)),
    marks=(Mark(4.65, "papers done"),),
    samples=tuple(Sample(i / 2, {CARD: i * GIB // 2, USED: i * GIB // 2 + GIB}) for i in range(11)),
    sample_every_s=0.5,
    limits={CARD: 8 * GIB, USED: 8 * GIB},
)
EMPTY = Watch().timeline


def texts(picture):
    return [shape.text for shape in picture.shapes if isinstance(shape, Label)]


def test_the_table_shows_memory_then_calls_with_their_attempts(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = table_text(WATCHED).splitlines()
    calls = [" ".join(line.split()) for line in lines]

    assert lines[2].split() == ["cuda:0", "allocated", "1.00", "GiB", "7.00", "GiB", "2.00", "GiB", "8.00", "GiB"]
    assert "~7.00 GiB" in lines[3]
    assert "generate 64 1,000 + 256 3.6 s 1.00 GiB 7.00 GiB 2.00 GiB 64 -> 23" in calls
    assert "one every 0.5 s" in lines[-1]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_table_is_no_wider_than_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, table_text(WATCHED).splitlines())) <= columns


def test_of_many_calls_the_failed_and_the_largest_are_shown_and_the_rest_counted():
    small = [SeenCall("forward", "call", float(i), 0.1, uses=(replace(USE, peak_bytes=i),)) for i in range(100)]
    failed = SeenCall("forward", "call", 200.0, 0.1, error="OutOfMemoryError")
    text = table_text(replace(WATCHED, rows=(*small, failed)))

    assert text.count("forward") == 20
    assert "OutOfMemoryError" in text
    assert "81 more calls: in .rows and the CSV" in text


def test_two_models_are_told_apart_by_name():
    text = table_text(replace(WATCHED, rows=(CALL, replace(CALL, model="GPT2LMHeadModel"))))
    assert "GPT2LMH" in text.replace("\n", "")


def test_the_csv_has_a_line_for_each_counter_and_call_in_bytes():
    rows = list(csv.DictReader(io.StringIO(rows_csv(WATCHED))))

    assert [(row["kind"], row["what"], row["device"], row["counter"]) for row in rows] == [
        ("watch", "", "cuda:0", "allocated"),
        ("watch", "", "cuda:0", "in use"),
        ("call", "generate", "cuda:0", "allocated"),
        ("span", "save", "", ""),
        ("mark", "papers done", "", ""),
    ]
    assert rows[2]["peak_bytes"] == str(7 * GIB)
    assert rows[2]["attempts"] == "64 -> 23"
    assert rows[1]["peak_is_sampled"] == "yes"
    assert rows[3]["rows"] == ""


def test_the_csv_of_samples_has_each_counter_at_each_moment():
    rows = list(csv.DictReader(io.StringIO(samples_csv(WATCHED))))
    assert len(rows) == 22
    assert rows[2] == {"seconds": "0.500000", "device": "cuda:0", "counter": "allocated", "bytes": str(GIB // 2)}


def test_the_picture_shows_lines_limit_calls_attempts_and_marks():
    picture = timeline_picture(WATCHED)
    words = texts(picture)

    assert {"cuda:0", "limit 8.00 GiB", "generate", "batch_size 64 failed", "papers done"} <= set(words)
    assert len([s for s in picture.shapes if isinstance(s, Line) and s.color == "limit" and s.is_dashed]) == 2
    (line,) = [s for s in picture.shapes if isinstance(s, Line) and len(s.points) == 11 and s.color == "allocated"]
    heights = [y for _, y in line.points]
    assert heights == sorted(heights, reverse=True)
    assert len([s for s in picture.shapes if isinstance(s, Rect) and s.color == "failed"]) == 1


@pytest.mark.parametrize(
    "timeline", [WATCHED, EMPTY, replace(WATCHED, seconds=0.0), replace(WATCHED, rows=(CALL,) * 2000)]
)
def test_every_shape_lies_in_the_picture(timeline):
    picture = timeline_picture(timeline)
    for shape in picture.shapes:
        points = shape.points if isinstance(shape, Line) else [(shape.x, shape.y)]
        assert all(-1 <= x <= WIDTH + 1 and -1 <= y <= picture.height + 1 for x, y in points)


LABELS = {
    "12 of 13 letters": [f"layer {i} saved" for i in range(12)],
    "30 long ones": [f"checkpoint number {i} written to disk" for i in range(30)],
    "one of 500": ["first", "x" * 500, "last"],
    "line breaks": ["line\nbreak"] * 4,
    "wide letters": ["中文标签" * 3, "WWWMMM@@" * 2] * 8,
    "a row's end": ["at the very end of the run"] * 3,
}


@pytest.mark.parametrize("name", LABELS)
@pytest.mark.parametrize("kind", ["marks", "failures"])
def test_labels_of_marks_and_failures_lie_beside_one_another_and_within_the_axis(name, kind):
    labels = LABELS[name]
    times = [5.0 - 0.01 * i if "end" in name else 5.0 * (i + 1) / len(labels) for i in range(len(labels))]
    if kind == "marks":
        seen = replace(WATCHED, rows=(), marks=tuple(map(Mark, times, labels)))
    else:
        failed = (
            TimedAttempt(Attempt(1, {label: 1}, error="OutOfMemoryError"), at - 0.1, at)
            for at, label in zip(times, labels, strict=True)
        )
        seen = replace(WATCHED, marks=(), rows=(replace(CALL, attempts=tuple(failed)),))
    color = kind.removesuffix("s").replace("failure", "failed")
    drawn = [s for s in timeline_picture(seen).shapes if isinstance(s, Label) and s.color == color]
    pixels = [drawn_pixels(label) for label in drawn]

    assert drawn or name == "30 long ones"  # 28 pixels each
    assert all("\n" not in label.text for label in drawn)
    assert all(left >= 92 and right <= WIDTH - 20 for left, right in pixels)
    assert all(before[1] <= after[0] for before, after in pairwise(sorted(pixels)))


def drawn_pixels(label):
    """Return from where to where a label reaches, by the outlines of the letters that matplotlib draws."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    text = "".join(
        "M" if ord(letter) > 0x2E80 else letter for letter in label.text
    )  # no glyph in its own font: a box, narrower
    wide = TextPath((0, 0), text, size=label.size, prop=FontProperties(family="DejaVu Sans")).get_extents().width
    return (label.x - wide, label.x) if label.anchor == "end" else (label.x, label.x + wide)


def test_a_label_that_has_room_is_whole_and_one_without_is_where_a_reader_points():
    few = timeline_picture(replace(WATCHED, marks=(Mark(1.0, "model loaded"), Mark(4.9, "papers done"))))
    many = timeline_picture(replace(WATCHED, marks=tuple(Mark(i / 100, f"step {i}") for i in range(400))))

    assert {"model loaded", "papers done"} <= set(texts(few))
    assert "step 7" not in texts(many)
    assert "step 7" in [s.title for s in many.shapes if isinstance(s, Line)]


def test_an_empty_run_is_a_page_that_says_so():
    text = page(EMPTY)

    assert "Nothing was seen: no counter was read." in text
    assert png(timeline_picture(EMPTY)).startswith(b"\x89PNG")
    assert table_text(EMPTY) == "nothing was seen: the watch was not entered"
    assert rows_csv(EMPTY).count("\n") == 2
    assert samples_csv(EMPTY).count("\n") == 1


@pytest.mark.parametrize("timeline", [WATCHED, EMPTY], ids=["watched", "empty"])
def test_a_cell_of_a_notebook_has_the_picture_and_the_tables_and_styles_that_reach_nothing_else(timeline):
    text = fragment(timeline)

    assert text.startswith('<div class="oomguard">')
    assert not re.search(r"<(?:html|body|script|link|img|iframe|h1)\b|url\(|@import", text)
    assert "<svg" in text
    assert ("<table>" in text) == (timeline is WATCHED)
    styles = "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL))
    selectors = re.findall(r"([^{}]+)\{", re.sub(r"@media[^{]*\{", "", styles))
    assert [s for group in selectors for s in group.split(",") if not s.strip().startswith(".oomguard")] == []


def test_a_watch_as_the_last_line_of_a_cell_shows_what_it_saw():
    with Watch() as seen, seen.span("<papers>"):
        pass
    assert "&lt;papers&gt;" in seen._repr_html_()


def test_a_run_of_one_sample_is_drawn():
    once = Timeline(seconds=0.0, samples=(Sample(0.0, {CARD: 0}),))
    assert "cuda:0" in texts(timeline_picture(once))
    assert png(timeline_picture(once)).startswith(b"\x89PNG")


def test_the_page_is_well_formed_loads_nothing_and_runs_nothing():
    text = page(WATCHED)
    drawing = ET.fromstring(svg(timeline_picture(WATCHED)))

    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "default-src 'none'" in text


HOSTILE = '<script>alert(1)</script> \x1b[31m$x^2$ & "q" \' \ud800 ' + "hf_" + "a" * 34


def test_a_hostile_label_is_text_and_a_secret_in_it_is_masked():
    hostile = replace(
        WATCHED, rows=(replace(CALL, what=HOSTILE, error=HOSTILE),), marks=(Mark(1.0, HOSTILE),), error=HOSTILE
    )
    text = page(hostile)
    ET.fromstring(svg(timeline_picture(hostile)))
    for shown in (text, rows_csv(hostile), table_text(hostile)):
        assert "hf_aaa" not in shown
        assert "\x1b" not in shown
        shown.encode()
    assert "<script" not in text
    assert png(timeline_picture(hostile)).startswith(b"\x89PNG")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="matplotlib") as caught:
        Watch().to_png(tmp_path / "watch.png")
    assert install_hint("plots") in caught.value.hint
    assert not (tmp_path / "watch.png").exists()


@pytest.mark.parametrize("form", ["csv", "html", "png"])
def test_a_file_that_cannot_be_written_is_told_by_name(tmp_path, form):
    with pytest.raises(UsageError, match=f"none/watch.{form} cannot be written: No such file"):
        getattr(Watch(), f"to_{form}")(tmp_path / "none" / f"watch.{form}")


@pytest.mark.parametrize("form", ["csv", "html", "png"])
def test_a_watch_writes_what_it_saw(tmp_path, form):
    with Watch() as seen:
        pass
    getattr(seen, f"to_{form}")(tmp_path / "file")
    assert (tmp_path / "file").stat().st_size > 100


def test_a_narrow_table_cuts_the_models_name_and_never_the_calls(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    models = ("LlamaForCausalLMWithAVeryLongName", "GPT2LMHeadModel")
    text = table_text(
        replace(
            WATCHED, rows=tuple(replace(CALL, what=what, model=m) for what in ("generate", "forward") for m in models)
        )
    )
    assert (text.count("generate"), text.count("forward")) == (2, 2)


@pytest.mark.parametrize("label", ["=HYPERLINK(1)", "+1", "-1", "@SUM(1)", "\x1b[31m=cmd"])
def test_a_label_that_a_spreadsheet_would_run_is_text_in_the_csv(label):
    timeline = replace(WATCHED, rows=(replace(CALL, what=label),), marks=(Mark(0.5, label),))
    cells = [row["what"] for row in csv.DictReader(io.StringIO(rows_csv(timeline)))]
    assert sum(cell.startswith("'") for cell in cells) >= 2
    assert not any(cell[:1] in {"=", "+", "-", "@"} for cell in cells)
