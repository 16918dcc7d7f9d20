"""Past runs on the terminal and as JSON: masked, escaped, as wide as the screen."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from oomguard.core.incident import Attempt, Cause, Effect, Incident, Patch
from oomguard.core.past_runs import PastAttempt, PastRun
from oomguard.report.history import learned_words, print_run, print_runs, run_dict, run_json

FIGURE = "kv_cache_capacity_tokens"
PATCH = Patch(
    "max_model_len", 32768, 1792, Effect.REDUCES_CAPACITY, "it fits", predicts={FIGURE: 1792}
)
OOM = Incident(
    "cuda_oom",
    "CUDA out of memory",
    causes=(Cause("batch_too_large", "OG301", 0.9, (), "Too many."),),
)
BEGAN = 1_795_600_000.0


def attempt(
    number: int,
    status: int | None,
    incident: Incident | None = None,
    patches=(),
    measured=None,
    at=BEGAN,
):
    error = f"exit status {status}" if status and incident is None else ""
    row = Attempt(
        number,
        {p.setting: p.new for p in patches},
        patches,
        incident,
        status,
        error,
        1.0,
        measured or {},
    )
    predicted = {name: value for patch in patches for name, value in patch.predicts.items()}
    return PastAttempt(
        row, ("vllm",), at + number, None if status is None else at + number + 1, predicted
    )


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


def test_table_has_time_end_failure_and_predictions():
    for width in (80, 200):
        text = " ".join(printed(print_runs, [repaired(7)], width=width).split())
        expected = (
            "repaired",
            "cuda_oom:",
            "batch_too_large",
            "max_model_len 32768 -> 1792",
            "1,792 -> 1,808",
        )
        missing = [words for words in expected if words not in text]
        assert not missing, f"missing at {width} columns: {missing}"


def test_no_line_exceeds_the_screen_and_failures_have_half():
    for width in (20, 40, 59, 60, 80):
        lines = printed(
            print_runs, [repaired(7), run(6, attempt(1, 143))], width=width
        ).splitlines()

        assert max(map(len, lines)) <= width
        assert any("cuda_oom:" in line for line in lines), f"{width} columns"
        assert sum("batch_too_large" in line for line in lines) == 1, f"{width} columns"


def test_first_runs_are_shown_before_the_last_are_read():
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
    assert {line.index("vllm serve m") for line in lines if "vllm" in line} == {
        lines[1].index("command")
    }
    assert {re.search(r"\d{4}-\d\d", line).start() for line in lines if "vllm" in line} == {
        lines[1].index("began")
    }
    assert sum(not line.strip() for line in lines) == 2


def test_full_run_view_names_known_and_unknown_facts():
    known = run(
        1,
        attempt(1, 0),
        folder="/work",
        engine="vllm",
        engine_version="0.33.0",
        model="m",
        device="H100, 79 GiB",
    )
    text = printed(print_run, known)
    for words in ("run 1: ran, exit 0", "/work", "vllm 0.33.0", "H100, 79 GiB"):
        assert words in text
    unknown = printed(print_run, run(1, attempt(1, None)))
    for words in (
        "run 1: not ended",
        "not recorded",
        "engine   unknown",
        "model    unknown",
        "device   unknown",
    ):
        assert words in unknown


def test_json_has_what_is_not_known_as_null():
    row = run_dict(run(1, attempt(1, None)))

    assert {
        row[key]
        for key in (
            "seconds",
            "exit_status",
            "folder",
            "engine",
            "engine_version",
            "model",
            "device",
        )
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
def test_no_secret_and_no_escape_of_a_command_reaches_any_form(words):
    from oomguard.core.redact import mask_command

    shown = repaired(1, command=mask_command(words), model="<b>", folder="/home/alice")
    for text in (printed(print_runs, [shown]), printed(print_run, shown), run_json(shown)):
        assert "\x1b" not in text
        text.encode()
        assert "alice" not in text
    json.loads(run_json(shown))


def test_only_a_run_that_worked_with_changes_taught_something():
    assert "max_model_len = 1792" in (learned_words(repaired(3)) or "")
    assert learned_words(run(1, attempt(1, 0))) is None
    assert learned_words(run(1, attempt(1, 1, OOM, (PATCH,)))) is None


def test_unfinished_attempt_has_no_result_and_no_time():
    going = run(1, attempt(1, 1, OOM), attempt(2, None, None, (PATCH,)))
    text = printed(print_run, going)
    assert text.splitlines()[0] == "run 1: not ended"
    (line,) = [line for line in text.splitlines() if line.strip().startswith("2 ")]
    assert "not ended" in line
    assert " s" not in line.split("not ended")[1]
    assert "Ran with reduced settings" not in text
    assert json.loads(run_json(going))["attempts"][1]["seconds"] is None


def test_other_failures_than_memory_are_in_the_list_too():
    first = [
        replace(attempt(number, status), is_followed=True)
        for number, status in ((1, 3), (2, 3), (3, 7))
    ]
    text = " ".join(printed(print_runs, [run(1, *first, attempt(4, 0))]).split())
    assert "repaired" in text
    assert "2 attempts failed: exit status 3 1 attempt failed: exit status 7" in text


def test_hang_that_ended_the_run_is_listed_with_its_reason():
    hung = attempt(1, 143)
    hung = replace(
        hung, attempt=replace(hung.attempt, error="the server hangs: x"), why="the server hangs: x"
    )
    text = " ".join(printed(print_runs, [run(1, hung)]).split())
    assert "1 attempt failed: the server hangs: x" in text
