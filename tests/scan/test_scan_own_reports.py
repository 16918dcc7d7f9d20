"""oomguard's own output in a log is no failure of its own, and hides none that stands in it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from oomguard.cli.run import _console_line, _json_line
from oomguard.core.incident import Attempt, Diagnosis
from oomguard.diagnosis import diagnose_lines, diagnose_stream
from oomguard.guarding.advice import note
from oomguard.report.history import attempts_table, report_text
from oomguard.report.json import to_json
from oomguard.report.markdown import to_markdown
from oomguard.report.panel import print_diagnosis
from oomguard.scan.source import Line

LOGS = Path(__file__).parents[2] / "examples" / "logs"
FAILED = ("vllm_0.21.0_start_failed", "vllm_script_utilization_too_high", "vllm_serve_kv_cache")
CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB "
    "of which 512.00 MiB is free."
)
FORMS = (
    "panel",
    "narrow panel",
    "panel of ASCII",
    "events",
    "events as JSON",
    "note",
    "table",
    "JSON",
    "Markdown",
    "page",
)


def lines_of(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text().splitlines()


def read(lines: list[str]) -> Diagnosis:
    return diagnose_lines([Line(number, 0, text) for number, text in enumerate(lines, 1)])


def drawn(diagnosis: Diagnosis, width: int, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    print_diagnosis(
        Console(file=file, width=width),
        diagnosis,
        {"max_model_len": "vllm serve ./tiny --max-model-len 1"},
    )
    return file.buffer.getvalue().decode(encoding)


def printed(form: str, diagnosis: Diagnosis) -> list[str]:
    """What oomguard prints of a diagnosis."""
    incident = diagnosis.first_cause
    assert incident is not None
    attempts = [Attempt(1, {}, incident=incident, exit_status=1)]
    fields = {"kind": incident.kind, "what": incident.headline, "cause": incident.causes[0].id}
    with io.StringIO() as table:
        Console(file=table, width=80).print(attempts_table(attempts))
        texts = {
            "panel": lambda: drawn(diagnosis, 80),
            "narrow panel": lambda: drawn(diagnosis, 28),
            "panel of ASCII": lambda: drawn(diagnosis, 80, "ascii"),
            "events": lambda: _console_line("warning", "out of memory", fields),
            "events as JSON": lambda: _json_line("warning", "out of memory", fields),
            "note": lambda: note(incident, attempts),
            "table": table.getvalue,
            "JSON": lambda: to_json(diagnosis),
            "Markdown": lambda: to_markdown(diagnosis),
            "page": lambda: report_text(".html", diagnosis, attempts),
        }
        return texts[form]().splitlines()


def seen(diagnosis: Diagnosis) -> list[object]:
    """What was found, without where."""
    return [
        (i.kind, i.repeated, {name: fact.value for name, fact in i.facts.items()})
        for i in diagnosis.incidents
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAILED)
def test_what_oomguard_prints_is_no_failure(form: str, name: str):
    assert read(printed(form, read(lines_of(name)))).incidents == ()


@pytest.mark.parametrize("form", [form for form in FORMS if form not in {"table", "note"}])
def test_where_nothing_else_stands_a_note_says_that_it_was_seen(form: str):
    (told,) = read(printed(form, read(lines_of("vllm_serve_kv_cache")))).notes
    assert told.startswith("this is oomguard's own report, not a failure of its own: ")
    is_named = form not in {"Markdown", "page", "narrow panel"}
    assert ("kv_cache_too_small_for_max_len (line " in told) == is_named


@pytest.mark.parametrize("form", FORMS)
def test_log_with_foreign_lines_reads_as_without_them(form: str):
    log = lines_of("vllm_0.21.0_start_failed")
    alone = read(log)
    own = printed(form, alone)

    @settings(max_examples=15)
    @given(st.lists(st.integers(0, len(log)), min_size=len(own), max_size=len(own)).map(sorted))
    def holds(places: list[int]) -> None:
        mixed = list(log)
        for place, text in reversed(list(zip(places, own, strict=True))):
            mixed.insert(place, text)
        found = read(mixed)
        assert seen(found) == seen(alone)
        assert len(found.starts) == len(alone.starts)
        assert not [text for text in found.notes if "own report" in text]

    holds()


def test_an_outer_launchers_prefix_does_not_hide_it():
    own = printed("panel", read(lines_of("vllm_serve_kv_cache")))
    for prefix in (
        "0: ",
        "[default0]:",
        "(Worker_TP0 pid=7) ",
        "2026-11-26T10:00:00.123456789Z stderr F ",
    ):
        assert read([f"{prefix}{text}" for text in own]).incidents == ()


def test_panel_of_another_program_inside_ours_is_read():
    box = ["╭─ Error ─────────────╮", f"│ {CUDA} │", "╰─────────────────────╯"]
    own = printed("panel", read(lines_of("vllm_serve_kv_cache")))
    for log in (box, [*own[:9], *box, *own[9:]], [*own, *box], [*own[:9], *box]):
        assert [incident.kind for incident in read(log).incidents] == ["cuda_oom"]


def test_a_failure_between_its_lines_is_read():
    own = printed("panel", read(lines_of("vllm_serve_kv_cache")))
    (found,) = read([*own[:10], CUDA, *own[10:]]).incidents
    assert (found.kind, found.location.line) == ("cuda_oom", 11)


def test_a_box_whose_end_is_lost_hides_nothing_for_long():
    own = printed("panel", read(lines_of("vllm_serve_kv_cache")))[:-10]
    assert read([*own, *["│ a row of something else │"] * 200, f"│ {CUDA} │"]).incidents != ()


def test_in_an_input_of_megabytes_it_is_known_too():
    diagnosis = read(lines_of("vllm_serve_kv_cache"))
    cause = replace(
        diagnosis.incidents[0].causes[0], explanation="A long story. " * 100
    )  # its top is far from what it quotes
    told = replace(diagnosis, incidents=(replace(diagnosis.incidents[0], causes=(cause,)),))
    own = printed("panel", told)
    filler = ["INFO: 10.0.0.1:51 - POST /v1/completions HTTP/1.1 200 OK"] * 20_000
    text = "\n".join([*filler, *own, *filler])
    assert diagnose_stream(io.BytesIO(text.encode())).incidents == ()
    real = "\n".join([*filler, *own, CUDA, *filler])
    assert [incident.kind for incident in diagnose_stream(io.BytesIO(real.encode())).incidents] == [
        "cuda_oom"
    ]
