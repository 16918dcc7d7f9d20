"""What a watch saw as tables, CSV, plot and trace; an empty run, hostile labels, many calls."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import defaultdict
from dataclasses import replace

import pytest

from oomguard import UsageError, Watch
from oomguard.core.incident import Attempt
from oomguard.core.installation import install_hint
from oomguard.core.measurements import (
    Counter,
    Mark,
    MemoryUse,
    Sample,
    SeenCall,
    TimedAttempt,
    Timeline,
)
from oomguard.report.timeline import figure, png, rows_csv, samples_csv, table_text, trace_json

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


def test_the_table_shows_memory_then_calls_with_their_attempts(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = table_text(WATCHED).splitlines()
    calls = [" ".join(line.split()) for line in lines]

    assert lines[2].split() == [
        "cuda:0",
        "allocated",
        "1.00",
        "GiB",
        "7.00",
        "GiB",
        "2.00",
        "GiB",
        "8.00",
        "GiB",
    ]
    assert "~7.00 GiB" in lines[3]
    assert "generate 64 1,000 + 256 3.6 s 1.00 GiB 7.00 GiB 2.00 GiB 64 -> 23" in calls
    assert "taken every 0.5 s" in lines[-1]


def test_the_table_is_no_wider_than_the_terminal(monkeypatch):
    for columns in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert max(map(len, table_text(WATCHED).splitlines())) <= columns


def test_failed_and_largest_calls_are_shown_and_others_counted():
    small = [
        SeenCall("forward", "call", float(i), 0.1, uses=(replace(USE, peak_bytes=i),))
        for i in range(100)
    ]
    failed = SeenCall("forward", "call", 200.0, 0.1, error="OutOfMemoryError")
    text = table_text(replace(WATCHED, rows=(*small, failed)))

    assert text.count("forward") == 20
    assert "OutOfMemoryError" in text
    assert "81 more calls are in .rows and the CSV" in text


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
    assert rows[2] == {
        "seconds": "0.500000",
        "device": "cuda:0",
        "counter": "allocated",
        "bytes": str(GIB // 2),
    }


def test_plot_has_counters_limit_calls_failures_and_marks():
    (panel,) = figure(WATCHED).axes

    lines = {line.get_label(): list(line.get_ydata()) for line in panel.lines}
    assert lines["allocated"] == [i / 2 for i in range(11)]
    assert set(lines["limit 8.00 GiB"]) == {8.0}
    assert [text.get_text() for text in panel.texts] == [
        "generate: batch_size 64 failed",
        "papers done",
    ]
    assert len(panel.patches) == 2
    assert (panel.get_title(loc="left"), panel.get_ylabel()) == ("cuda:0", "GiB")
    assert "peak of a call" in [text.get_text() for text in panel.get_legend().get_texts()]


def test_plot_has_a_panel_per_device_and_small_sizes_in_mib():
    other = Counter("cuda:1", "allocated")
    small = Timeline(seconds=1.0, samples=(Sample(0.0, {CARD: 2**20, other: 2**21}),))
    first, second = figure(small).axes
    assert [list(axes.lines[0].get_ydata()) for axes in (first, second)] == [[1.0], [2.0]]
    assert first.get_ylabel() == "MiB"


def test_many_and_odd_timelines_are_plotted():
    labels = [f"checkpoint number {i} written" for i in range(30)] + [
        "x" * 500,
        "line\nbreak",
        "at the end",
    ]
    marks = tuple(Mark(5.0 * i / len(labels), label) for i, label in enumerate(labels))
    odd = (
        EMPTY,
        replace(WATCHED, seconds=0.0),
        replace(WATCHED, rows=(CALL,) * 300),
        replace(WATCHED, marks=marks),
        Timeline(seconds=0.0, samples=(Sample(0.0, {CARD: 0}),)),
    )
    for timeline in odd:
        assert png(timeline).startswith(b"\x89PNG")


def test_an_empty_run_says_so_in_every_form():
    assert figure(EMPTY).texts[0].get_text() == "The watch read no counter."
    assert table_text(EMPTY) == "the watch recorded nothing: the program did not enter it"
    assert rows_csv(EMPTY).count("\n") == 2
    assert samples_csv(EMPTY).count("\n") == 1
    assert [event["ph"] for event in json.loads(trace_json(EMPTY))["traceEvents"]] == ["M"]


def events(timeline, phase):
    return [
        event for event in json.loads(trace_json(timeline))["traceEvents"] if event["ph"] == phase
    ]


def test_trace_has_calls_attempts_counters_and_marks():
    call, failed, ran, span = events(WATCHED, "X")
    assert (call["name"], call["cat"], call["ts"], call["dur"]) == (
        "LlamaForCausalLM.generate",
        "call",
        1e6,
        3.6e6,
    )
    assert call["args"]["rows"] == 64
    assert call["args"]["cuda:0 allocated, peak_bytes"] == 7 * GIB
    assert (failed["name"], failed["args"]) == (
        "batch_size 64 failed",
        {"error": "OutOfMemoryError"},
    )
    assert (ran["name"], ran["tid"], span["name"]) == ("batch_size 23 ran", call["tid"], "save")
    sizes = [
        event["args"]["bytes"]
        for event in events(WATCHED, "C")
        if event["name"] == "cuda:0 allocated"
    ]
    assert sizes == [i * GIB // 2 for i in range(11)]
    (mark,) = events(WATCHED, "i")
    assert (mark["name"], mark["ts"]) == ("papers done", 4.65e6)


def test_slices_of_a_track_nest_without_summed_calls():
    overlapping = [SeenCall("forward", "call", i * 0.7, 1.0 + i % 3) for i in range(20)]
    summed_up = replace(CALL, calls=5)
    tracks = defaultdict(list)
    for event in events(replace(WATCHED, rows=(*overlapping, summed_up)), "X"):
        tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))

    assert sum(map(len, tracks.values())) == 20
    for slices in tracks.values():
        for began, ended in slices:
            crossing = [one for one in slices if began < one[0] < ended < one[1]]
            assert not crossing, f"{(began, ended)} and {crossing} overlap without nesting"


def test_watch_at_a_cells_end_is_a_plot_with_matplotlib(monkeypatch):
    with Watch() as seen:
        pass
    assert seen._repr_png_().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert seen._repr_png_() is None


HOSTILE = '<script>alert(1)</script> \x1b[31m$x^2$ & "q" \' \ud800 ' + "hf_" + "a" * 34


def test_a_hostile_label_is_text_and_a_secret_in_it_is_masked():
    hostile = replace(
        WATCHED,
        rows=(replace(CALL, what=HOSTILE, error=HOSTILE),),
        marks=(Mark(1.0, HOSTILE),),
        error=HOSTILE,
    )
    labels = "".join(text.get_text() for text in figure(hostile).axes[0].texts)
    trace = "".join(str(event) for event in json.loads(trace_json(hostile))["traceEvents"])
    for shown in (labels, trace, rows_csv(hostile), table_text(hostile)):
        assert "hf_aaa" not in shown
        assert "\x1b" not in shown
        shown.encode()
    assert png(hostile).startswith(b"\x89PNG")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="matplotlib") as caught:
        Watch().to_png(tmp_path / "watch.png")
    assert install_hint("plots") in caught.value.hint
    assert not (tmp_path / "watch.png").exists()


def test_watch_writes_its_rows_and_names_an_unwritable_file(tmp_path):
    with Watch() as seen:
        pass
    for form in ("csv", "png", "trace"):
        getattr(seen, f"to_{form}")(tmp_path / form)
        assert (tmp_path / form).stat().st_size > 100, form
        with pytest.raises(UsageError, match=f"none/watch.{form} cannot be written: No such file"):
            getattr(seen, f"to_{form}")(tmp_path / "none" / f"watch.{form}")


def test_a_narrow_table_cuts_the_models_name_and_never_the_calls(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    models = ("LlamaForCausalLMWithAVeryLongName", "GPT2LMHeadModel")
    text = table_text(
        replace(
            WATCHED,
            rows=tuple(
                replace(CALL, what=what, model=m)
                for what in ("generate", "forward")
                for m in models
            ),
        )
    )
    assert (text.count("generate"), text.count("forward")) == (2, 2)


def test_a_label_that_a_spreadsheet_would_run_is_text_in_the_csv():
    for label in ("=HYPERLINK(1)", "+1", "-1", "@SUM(1)", "\x1b[31m=cmd"):
        timeline = replace(WATCHED, rows=(replace(CALL, what=label),), marks=(Mark(0.5, label),))
        cells = [row["what"] for row in csv.DictReader(io.StringIO(rows_csv(timeline)))]
        assert sum(cell.startswith("'") for cell in cells) >= 2, label
        assert not any(cell[:1] in {"=", "+", "-", "@"} for cell in cells), label
