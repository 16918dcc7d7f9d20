"""The panel: at any width, on any console, with nothing of the log's own able to act on the terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.color import Color
from rich.console import Console

from oomguard.core.facts import GIB
from oomguard.core.incident import Alternative, Budget, BudgetPart, Diagnosis, Effect, Patch
from oomguard.core.text import strip_escapes
from oomguard.diagnosis import diagnose_lines
from oomguard.remedy.actions import with_actions
from oomguard.report.bar import COLORS, GRAY, GREEN, RED
from oomguard.report.panel import print_diagnosis
from oomguard.rules.rule_files import ActionTable
from oomguard.scan.source import Line

CUDA = (
    "(EngineCore_DP0 pid=771) ERROR 03-04 10:00:07 [core.py:708] torch.OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 512.00 MiB is free. Process 12 has 1.00 GiB "
    "memory in use. Including non-PyTorch memory, this process has 22.10 GiB memory in use. Of the allocated memory "
    "21.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try this."
)
NONE_LEFT = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when starting."
LOG = ["Available KV cache memory: -3.79 GiB", NONE_LEFT, "", CUDA]
SHORT = CUDA.split(" Process 12", 1)[0]


def diagnosis(*log: str, source: str = "error.log") -> Diagnosis:
    return diagnose_lines([Line(number, 0, text) for number, text in enumerate(log, 1)], source)


def shown(
    found: Diagnosis,
    *,
    width: int = 80,
    encoding: str = "utf-8",
    color: bool = False,
    commands=None,
    full: bool = False,
) -> str:
    """What a console of that width and encoding gets; a character the encoding does not have raises."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict", newline="")
    console = Console(
        file=stream,
        width=width,
        force_terminal=color,
        no_color=not color,
        highlight=False,
        legacy_windows=False,
    )
    print_diagnosis(console, found, commands, full=full)
    stream.flush()
    return raw.getvalue().decode(encoding)


def words(text: str) -> str:
    """The panel's text without its line breaks."""
    return " ".join(text.split())


def with_plan(**changes) -> Diagnosis:
    patch = replace(
        Patch(
            "max_model_len",
            40960,
            26624,
            Effect.REDUCES_CAPACITY,
            "it fits",
            as_flag="--max-model-len 26624",
            tradeoff="Shorter.",
        ),
        **changes,
    )
    planned = replace(diagnosis(CUDA).incidents[0], plan=(patch,))
    return Diagnosis("error.log", (with_actions(planned, ActionTable()),))


def test_no_line_is_wider_than_the_console():
    for width in [20, 58, 80, 120]:
        for encoding in ["utf-8", "ascii"]:
            found = diagnosis(*LOG[:3], SHORT)
            lines = shown(found, width=width, encoding=encoding, full=True).splitlines()
            commands = {action.command for one in found.incidents for action in one.actions}
            wrapped = [line for line in lines if line.strip().split("  #")[0] not in commands]

            assert len(lines) > 10, (width, encoding)
            assert max(map(len, wrapped)) <= width, (width, encoding)


@pytest.mark.parametrize("width", [40, 80])
def test_no_figure_is_lost_in_a_narrow_console(width):
    text = words(shown(diagnosis(*LOG), width=width, full=True))

    for figure in ("2.00 GiB", "23.69 GiB", "21.00 GiB", "3.79 GiB", "100.00 MiB"):
        assert figure in text


@pytest.mark.parametrize("width", [40, 80])
def test_an_ascii_console_gets_ascii(width):
    text = shown(diagnosis(*LOG[:3], SHORT), width=width, encoding="ascii")

    assert text.isascii()
    assert "Do this: " in text


def test_an_ascii_console_gets_ascii_where_a_long_line_is_cut():
    assert shown(diagnosis(CUDA), encoding="ascii").isascii()


def test_an_ascii_console_survives_a_log_of_another_script():
    assert shown(diagnosis("显存 " + NONE_LEFT), encoding="ascii")


def test_a_unicode_console_gets_a_bar_and_no_frame():
    text = shown(diagnosis(CUDA))

    assert "█" in text
    assert not set("╭│╰") & set(text)


def test_the_bar_is_as_long_as_the_device_and_no_longer():
    parts = tuple(BudgetPart(f"part {i}", 30 * GIB) for i in range(4))
    crowded = replace(diagnosis(CUDA).incidents[0], budget=Budget(24 * GIB, parts))

    bars = [
        line for line in shown(Diagnosis("", (crowded,)), width=100).splitlines() if "██" in line
    ]

    assert len(bars) == 1
    assert sum(bars[0].count(mark) for mark in "█▓▒▚") == 60


def test_without_a_total_there_is_no_bar():
    assert "█" not in shown(diagnosis("Model loading took 15.2683 GiB and 4.3 seconds", NONE_LEFT))


def controls(text: str) -> set[str]:
    return {char for char in text if ord(char) < 32 or 127 <= ord(char) < 160}


def test_an_escape_in_the_log_does_not_reach_the_terminal():
    for escape in [
        "\x1b[2J",
        "\x1b]0;pwned\x07",
        "\x1b]8;;http://evil\x1b\\",
        "\x9b31m",
        "\x07",
        "\x08",
        "\x7f",
    ]:
        text = shown(diagnosis(f"{escape}ValueError: {NONE_LEFT}{escape}"))

        assert "ValueError" in text, escape
        assert controls(text) == {"\n"}, escape
        assert "pwned" not in text, escape
        assert "evil" not in text, escape


@pytest.mark.parametrize("log", [["all is well"], [NONE_LEFT]], ids=["healthy", "oom"])
def test_escape_in_a_log_name_does_not_reach_the_terminal(log):
    assert "\x1b" not in shown(diagnosis(*log, source="\x1b[2J.log"))


def test_markup_of_the_log_is_shown_as_it_is():
    for markup in ["[red]", "[/red]", "[bold", "[link=http://x]", ":smile:"]:
        line = NONE_LEFT.replace("ValueError", f"{markup}ValueError")

        assert f"{markup}ValueError" in words(shown(diagnosis(line), width=200)), markup


def test_a_healthy_log_is_one_line():
    assert shown(diagnosis("all is well")) == "error.log: no memory failure found\n"


def test_markup_in_the_name_of_a_healthy_log_is_shown_as_it_is():
    assert shown(diagnosis("x", source="[red]a.log")) == "[red]a.log: no memory failure found\n"


def test_notes_are_shown():
    assert "note: a pattern [x] was left out" in shown(
        Diagnosis("a.log", notes=("a pattern [x] was left out",))
    )


def test_a_repeated_failure_says_how_often():
    assert "printed 3 times" in shown(diagnosis(NONE_LEFT, "", NONE_LEFT, "", NONE_LEFT))


def test_a_patch_shows_its_change_its_cost_and_what_to_paste():
    text = words(shown(with_plan()))

    assert "Do this: Lower max_model_len from 40960 to 26624 [reduces-capacity]" in text
    assert "Cost: shorter." in text
    assert "--max-model-len 26624" in text


def test_only_a_run_says_why_it_did_not_change_a_setting():
    blocked = with_plan(blocked_by="you set it")

    assert "Not done: you set it" in words(shown(blocked, commands={}))
    assert "you set it" not in words(shown(blocked))


def test_a_patch_that_is_not_solved_has_nothing_to_paste():
    text = words(shown(with_plan(new=None, as_flag=None, blocked_by="you set it")))

    assert "Do this: Lower max_model_len (--max-model-len), now 40960" in text


def test_the_full_command_is_pasted_where_it_is_known():
    command = "vllm serve m --max-model-len 26624"

    lines = shown(with_plan(), commands={"max_model_len": command}).splitlines()

    assert f"  {command}" in lines[:5]


def test_an_alternative_says_why_it_is_none_of_the_plan():
    incident = replace(
        diagnosis(CUDA).incidents[0],
        alternatives=(Alternative("kv_cache_memory_bytes", 5, "a byte count you set", "--x 5"),),
    )

    assert "--x 5" in words(shown(Diagnosis("", (incident,))))
    assert "--x 5 a byte count you set" in words(shown(Diagnosis("", (incident,)), full=True))


def test_a_secret_in_the_evidence_is_hidden():
    assert "abcdefgh" not in shown(diagnosis(f"api_key='abcdefgh' {NONE_LEFT}"))


def relative_luminance(color: tuple[int, int, int]) -> float:
    """WCAG 2's relative luminance of a color."""
    parts = [value / 255 for value in color]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_color_can_be_read_on_black_and_on_white():
    used = {RED, GREEN, GRAY, *(terminal for terminal, _, _ in COLORS.values())}
    for color in used:
        parsed = Color.parse(color)
        assert parsed.number is not None, color
        assert parsed.number >= 16, f"{color}: the first 16 depend on the terminal's theme"
        luminance = relative_luminance(tuple(parsed.get_truecolor()))
        assert (luminance + 0.05) / 0.05 >= 4.5, f"{color} on black"
        assert 1.05 / (luminance + 0.05) >= 4.5, f"{color} on white"


def test_without_color_no_text_is_lost():
    colored = shown(diagnosis(CUDA), color=True)

    assert "\x1b[" in colored
    assert strip_escapes(colored.replace("\n", "\t")).replace("\t", "\n") == shown(diagnosis(CUDA))


def test_several_failures_open_with_a_table_in_order_of_action():
    text = shown(diagnosis(*LOG[:3], SHORT))
    lines = text.splitlines()

    assert lines[0] == "oomguard: 2 failures, the one to act on first"
    assert lines[1].startswith("  1. line 2: vLLM could not start: no memory is left")
    assert text.count("Do this: ") == 1
    assert shown(diagnosis(*LOG[:3], SHORT), full=True).count("Do this: ") == 2


def test_the_command_comes_within_five_lines_and_a_panel_has_at_most_24():
    for log in [(NONE_LEFT,), (CUDA,), LOG[:2], (SHORT,)]:
        lines = shown(diagnosis(*log)).splitlines()

        assert any(line.startswith("Do this: ") for line in lines[:4]), log
        assert len(lines) <= 24, log


def test_a_caret_is_under_each_figure_of_the_first_line():
    lines = shown(diagnosis(SHORT), width=100).splitlines()
    (at,) = (number for number, line in enumerate(lines) if "^" in line)
    marked = [
        lines[at - 1][found.start() : found.end()] for found in re.finditer(r"\^+", lines[at])
    ]

    assert marked[:2] == ["2.00 GiB", "23.69 GiB"]


def test_two_likely_causes_are_no_coin_toss():
    text = shown(
        diagnosis(
            "ValueError: Free memory on device (18.2/79.1 GiB) on startup is less than desired GPU "
            "memory utilization (0.85, 67.2 GiB)."
        )
    )

    assert text.count("% sure") == 1
    (second,) = (line for line in text.splitlines() if line.startswith("Or: "))
    assert second.endswith("(OG210)")
