"""Past runs in every form: masked, escaped, and summed up in numbers that agree with the runs."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from oomguard.incident import Attempt, Cause, Effect, Incident, Patch
from oomguard.past_runs import PastAttempt, PastRun
from oomguard.report.history import learned_words, print_run, print_runs, run_dict, run_json
from oomguard.report.history_html import MOST_ROWS, page
from oomguard.report.history_picture import WIDTH, history_picture
from oomguard.report.history_rows import change_rows, command_rows, prediction_rows
from oomguard.report.picture import Label, Rect
from oomguard.report.picture_svg import svg

FIGURE = "kv_cache_capacity_tokens"
PATCH = Patch("max_model_len", 32768, 1792, Effect.REDUCES_CAPACITY, "it fits", predicts={FIGURE: 1792})
OOM = Incident("cuda_oom", "CUDA out of memory", causes=(Cause("batch_too_large", "OG301", 0.9, (), "Too many."),))
DAY = 86400.0
BEGAN = 1_795_600_000.0
COLORS = {"failed", "repaired", "bad call", "other runs", "span", "dim"}


def attempt(number: int, status: int | None, incident: Incident | None = None, patches=(), measured=None, at=BEGAN):
    error = f"exit status {status}" if status and incident is None else ""
    row = Attempt(number, {p.setting: p.new for p in patches}, patches, incident, status, error, 1.0, measured or {})
    predicted = {name: value for patch in patches for name, value in patch.predicts.items()}
    return PastAttempt(row, ("vllm",), at + number, None if status is None else at + number + 1, predicted)


def run(number: int, *attempts: PastAttempt, command=("vllm", "serve", "m"), **more) -> PastRun:
    return PastRun(number, f"s{number}", tuple(command), attempts, **more)


def repaired(number: int, measured: float | None = 1808, **more) -> PastRun:
    at = more.pop("at", BEGAN)
    got = {} if measured is None else {FIGURE: measured}
    return run(number, attempt(1, 1, OOM, at=at), attempt(2, 0, None, (PATCH,), got, at=at), **more)


def printed(draw, *arguments, width=100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    draw(console, *arguments)
    return console.file.getvalue()


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_has_when_how_it_ended_what_failed_and_predicted_beside_measured(width):
    text = " ".join(printed(print_runs, [repaired(7)], width=width).split())

    for words in (
        "repaired",
        "cuda_oom:",
        "batch_too_large",
        "max_model_len 32768 -> 1792",
        "KV tokens 1,792 -> 1,808",
    ):
        assert words in text


@pytest.mark.parametrize("width", [20, 40, 59, 60, 80])
def test_no_line_is_wider_than_the_screen_and_what_failed_has_half_of_it(width):
    lines = printed(print_runs, [repaired(7), run(6, attempt(1, 143))], width=width).splitlines()

    assert max(map(len, lines)) <= width
    assert any("cuda_oom:" in line for line in lines)
    assert sum("batch_too_large" in line for line in lines) == 1


def test_the_first_runs_are_shown_before_the_last_are_read_and_all_in_the_same_columns():
    console = Console(file=io.StringIO(), width=100, highlight=False)
    seen: list[int] = []

    def runs():
        for number in range(1250, 950, -1):
            seen.append(len(console.file.getvalue()))
            yield run(number, attempt(1, 143 if number < 1000 else 0))

    print_runs(console, runs())
    lines = console.file.getvalue().splitlines()

    assert seen[0] == 0 < seen[-1]
    assert sum("began" in line for line in lines) == 1
    assert {line.index("vllm serve m") for line in lines if "vllm" in line} == {lines[1].index("command")}
    assert {re.search(r"\d{4}-\d\d", line).start() for line in lines if "vllm" in line} == {lines[1].index("began")}
    assert sum(not line.strip() for line in lines) == 2


def test_a_run_in_full_names_what_is_known_of_it_and_says_what_is_not():
    known = run(
        1, attempt(1, 0), folder="/work", engine="vllm", engine_version="0.33.0", model="m", device="H100, 79 GiB"
    )
    text = printed(print_run, known)
    for words in ("run 1: ran, exit 0", "/work", "vllm 0.33.0", "H100, 79 GiB"):
        assert words in text
    unknown = printed(print_run, run(1, attempt(1, None)))
    for words in ("run 1: not ended", "not recorded", "none spoke", "not known", "none that NVML told"):
        assert words in unknown


def test_json_has_what_is_not_known_as_null():
    row = run_dict(run(1, attempt(1, None)))

    assert {
        row[key] for key in ("seconds", "exit_status", "folder", "engine", "engine_version", "model", "device")
    } == {None}
    assert row["attempts"][0]["ended_at"] is None


hostile = st.sampled_from(
    [
        "--api-key",
        "Hunter2secret",
        "<script>alert(1)</script>",
        "\x1b]0;owned\x07",
        "a\nb",
        "\ud800",
        "--password=Hunter2secret",
        "'",
        "/home/alice/x",
    ]
)


@given(words=st.lists(hostile, min_size=1, max_size=5))
def test_no_secret_no_escape_and_no_markup_of_a_command_reaches_any_form(words):
    from oomguard.report.mask import mask_command

    shown = repaired(1, command=mask_command(words), model="<b>", folder="/home/alice")
    for text in (printed(print_runs, [shown]), printed(print_run, shown), run_json(shown), page([shown], nothing="")):
        assert "\x1b" not in text
        text.encode()
        assert "alice" not in text
    html = page([shown], nothing="")
    assert "<script" not in html
    assert "<b>" not in html
    json.loads(run_json(shown))


def test_only_a_run_that_worked_with_changes_taught_something():
    assert "max_model_len = 1792" in (learned_words(repaired(3)) or "")
    assert learned_words(run(1, attempt(1, 0))) is None
    assert learned_words(run(1, attempt(1, 1, OOM, (PATCH,)))) is None


def test_commands_are_counted_and_the_one_that_failed_most_is_first():
    runs = [
        repaired(4),
        run(3, attempt(1, 1, OOM), command=("b",)),
        run(2, attempt(1, 1), command=("b",)),
        run(1, attempt(1, 143)),
    ]
    headings, first, second = command_rows(runs)

    assert headings == ("command", "runs", "failed", "repaired", "ran", "stopped", "causes", "last")
    assert first[:7] == ("b", "2", "2", "0", "0", "0", "batch_too_large 1")
    assert second[:7] == ("vllm serve m", "2", "0", "1", "0", "1", "batch_too_large 1")


def test_a_run_that_was_stopped_or_has_not_ended_did_not_run():
    runs = [run(4, attempt(1, 0)), run(3, attempt(1, 143)), run(2, attempt(1, None)), repaired(1)]
    (headings, row) = command_rows(runs)
    assert dict(zip(headings[1:6], row[1:6], strict=True)) == {
        "runs": "4",
        "failed": "0",
        "repaired": "1",
        "ran": "1",
        "stopped": "1",
    }
    assert (headings[6], row[6]) == ("not ended", "1")
    titles = [
        shape.title for shape in history_picture(runs).shapes if isinstance(shape, Rect) and ", minute" in shape.title
    ]
    assert all(words in titles[-1] for words in ("1 ran", "1 stopped", "1 not ended", "1 it failed, then it ran"))
    (headings, row) = change_rows([run(1, attempt(1, 143, None, (PATCH,))), run(2, attempt(1, None, None, (PATCH,)))])
    assert dict(zip(headings[3:], row[3:], strict=True)) == {
        "made": "2",
        "then ran": "0",
        "then failed": "0",
        "then stopped": "1",
        "then not ended": "1",
    }


def test_a_change_is_counted_with_how_often_it_then_ran():
    runs = [repaired(1), repaired(2), run(3, attempt(1, 1, OOM, (PATCH,)))]

    assert change_rows(runs)[1:] == [("max_model_len", "32768 -> 1792", "reduces-capacity", "3", "2", "1")]


def test_predictions_stand_beside_what_was_measured_and_the_rest_is_counted():
    rows, sentence = prediction_rows([repaired(1, 1792), repaired(2, 1613), repaired(3, None)], most=1)

    assert [row[3:] for row in rows[1:]] == [("1,792", "1,792", "+0.0%")]
    assert sentence == "Of 2 predictions half are off by at most 5.0%. Of 1 more nothing was measured."


def test_the_page_loads_nothing_and_has_no_script():
    text = page([repaired(1), run(2, attempt(1, 0))], nothing="")
    tags = Tags()
    tags.feed(text)

    assert "script" not in tags.tags
    assert tags.links == []
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/)", text)
    for title in ("Incidents over time", "By command", "What was changed", "Predicted beside measured", "Runs"):
        assert f">{title}</h2>" in text


def test_a_page_without_runs_says_so():
    assert "no run is recorded in x" in page([], nothing="no run is recorded in x")
    assert "<svg" not in page([], nothing="")


def test_of_very_many_runs_the_newest_are_listed_and_the_rest_is_told():
    runs = [run(number, attempt(1, 0, at=BEGAN + number)) for number in range(MOST_ROWS + 50, 0, -1)]
    text = page(runs, nothing="")

    assert "50 more: oomguard history --format json --limit 0" in text
    assert "250 runs (250 ran)" in text


@pytest.mark.parametrize(
    ("seconds", "name"),
    [(0, "minute"), (40 * 60, "minute"), (20 * 3600, "hour"), (30 * DAY, "day"), (900 * DAY, "4 weeks"), (1e9, "year")],
)
def test_the_picture_has_spans_of_time_that_suit_its_length(seconds, name):
    picture = history_picture([repaired(2, at=BEGAN + seconds), repaired(1)])

    assert f"runs a {name}" in [shape.text for shape in picture.shapes if isinstance(shape, Label)]


@given(
    ages=st.lists(st.floats(0, 4e8), min_size=1, max_size=40),
    kinds=st.lists(
        st.sampled_from(["ran", "repaired", "failed", "other", "stopped", "not ended"]), min_size=40, max_size=40
    ),
)
def test_bars_are_as_high_as_runs_are_many_and_all_shapes_lie_in_the_picture(ages, kinds):
    made = {
        "ran": lambda n, at: run(n, attempt(1, 0, at=at)),
        "repaired": lambda n, at: repaired(n, at=at),
        "failed": lambda n, at: run(n, attempt(1, 1, OOM, at=at)),
        "other": lambda n, at: run(n, attempt(1, 1, at=at)),
        "stopped": lambda n, at: run(n, attempt(1, 143, at=at)),
        "not ended": lambda n, at: run(n, attempt(1, None, at=at)),
    }
    pairs = list(zip(sorted(ages, reverse=True), kinds, strict=False))
    picture = history_picture([made[kind](n, BEGAN + age) for n, (age, kind) in enumerate(pairs)])
    ET.fromstring(svg(picture))
    rects = [shape for shape in picture.shapes if isinstance(shape, Rect)]

    bars = [rect for rect in rects if ", " in rect.title and not rect.title.startswith("run ")]
    counted = {color: sum(bar.height for bar in bars if bar.color == color) for color in COLORS}
    present = {"ran": "other runs", "repaired": "repaired", "failed": "failed", "other": "bad call"}
    present |= {"stopped": "span", "not ended": "dim"}
    of = {color: sum(1 for _age, kind in pairs if present[kind] == color) for color in COLORS}
    a_run = sum(counted.values()) / len(pairs)
    for color in COLORS:
        assert counted[color] == pytest.approx(of[color] * a_run)
    for rect in rects:
        assert -1 <= rect.x <= rect.x + rect.width <= WIDTH + 1
        assert 0 <= rect.y <= rect.y + rect.height <= picture.height


def test_a_picture_of_very_many_incidents_has_a_bounded_number_of_shapes():
    runs = [run(n, attempt(1, 1, OOM, at=BEGAN + 60 * n)) for n in range(20_000, 0, -1)]

    assert len(history_picture(runs).shapes) < 1000


def test_an_attempt_that_has_not_ended_has_no_result_no_time_and_reduced_nothing_yet():
    going = run(1, attempt(1, 1, OOM), attempt(2, None, None, (PATCH,)))
    text = printed(print_run, going)
    assert text.splitlines()[0] == "run 1: not ended"
    (line,) = [line for line in text.splitlines() if line.strip().startswith("2 ")]
    assert "not ended" in line
    assert " s" not in line.split("not ended")[1]
    assert "Ran with reduced settings" not in text
    assert json.loads(run_json(going))["attempts"][1]["seconds"] is None


def test_failures_of_something_else_than_memory_stand_in_the_list_too():
    first = [replace(attempt(number, status), is_followed=True) for number, status in ((1, 3), (2, 3), (3, 7))]
    text = " ".join(printed(print_runs, [run(1, *first, attempt(4, 0))]).split())
    assert "repaired" in text
    assert "2 attempts failed: exit status 3 1 attempt failed: exit status 7" in text


def test_a_hang_that_ended_the_run_stands_in_the_list_with_its_reason():
    hung = attempt(1, 143)
    hung = replace(hung, attempt=replace(hung.attempt, error="the server hangs: x"), why="the server hangs: x")
    text = " ".join(printed(print_runs, [run(1, hung)]).split())
    assert "1 attempt failed: the server hangs: x" in text


def test_in_a_picture_of_one_span_the_marks_lie_below_its_bar():
    shapes = [
        shape
        for shape in history_picture([repaired(1, at=BEGAN + 7)]).shapes
        if isinstance(shape, Rect) and shape.title
    ]
    bar, mark = shapes
    assert bar.x <= mark.x + mark.width / 2 <= bar.x + bar.width + 2
    assert bar.width < 60
