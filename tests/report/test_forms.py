"""What holds in every form of a report: the same content, no secret, nothing of the log that acts."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from oomguard.core.facts import Fact
from oomguard.core.incident import (
    Action,
    Alternative,
    Attempt,
    Budget,
    Cause,
    Diagnosis,
    Effect,
    EngineStart,
    Evidence,
    Incident,
    Location,
    Patch,
    SettingInForce,
)
from oomguard.core.redact import unmasked
from oomguard.guarding.advice import note
from oomguard.report.history import report_text
from oomguard.report.html import notebook_html, to_html
from oomguard.report.json import to_json
from oomguard.report.markdown import to_markdown
from oomguard.report.panel import print_diagnosis


def terminal(diagnosis: Diagnosis, width: int = 400) -> str:
    console = Console(file=io.StringIO(), width=width, legacy_windows=False)
    commands = (
        {"dtype": _without_home(diagnosis.incidents[0].plan[0].as_flag or "")}
        if diagnosis.incidents
        else None
    )
    print_diagnosis(console, diagnosis, commands, full=True)
    return " ".join(console.file.getvalue().replace("│", " ").split())


def _without_home(command: str) -> str:
    """The user's own command is pasted into the user's own terminal: home folders stay in it, secrets do not."""
    return "" if re.search(r"(?i)[/\\](?:home|users)[/\\]", command) else command


def attempts_report(form: str) -> Callable[[Diagnosis], str]:
    def report(diagnosis: Diagnosis) -> str:
        first = diagnosis.incidents[0]
        failed = Attempt(
            1, {"dtype": first.plan[0].as_flag or ""}, first.plan, first, 1, first.message
        )
        return report_text(form, diagnosis, [failed])

    return report


FORMS: dict[str, Callable[[Diagnosis], str]] = {
    "terminal": terminal,
    "json": to_json,
    "markdown": to_markdown,
    "html": to_html,
    "notebook": notebook_html,
    "note": lambda diagnosis: note(diagnosis.incidents[0]),
    "run.json": attempts_report(".json"),
    "run.md": attempts_report(".md"),
    "run.html": attempts_report(".html"),
}


def laden(text: str) -> Diagnosis:
    """A diagnosis that carries a text in every field that can hold one."""
    line = Evidence(text, 1)
    patch = Patch(
        "dtype",
        text,
        text,
        Effect.CHANGES_OUTPUTS,
        text,
        text,
        text,
        text,
        text,
        None,
        {},
        text,
        text,
    )
    action = Action(
        "dtype",
        text,
        "on",
        text,
        text,
        Effect.CHANGES_OUTPUTS,
        "manual",
        text,
        text,
        None,
        text,
        text,
        text,
    )
    facts = {"model": Fact("model", text)}
    in_force = {"model": SettingInForce("model", text, True, text)}
    incident = Incident(
        "cuda_oom",
        text,
        text,
        text,
        text,
        Location(1, 0, text),
        1,
        facts,
        in_force,
        True,
        (line,),
        (Cause("unknown", text, 0.5, (line,), text, text),),
        (patch,),
        (action,),
        (Alternative("dtype", text, text, text, text),),
        unknown=(text,),
        start=2,
        also_in=(text,),
        wrappers=(line,),
    )
    return Diagnosis(
        "a.log", (incident,), (text,), (EngineStart(1, text, text, 1, facts, in_force),)
    )


FAILURE = (
    "vLLM could not start: one request of 40,960 tokens needs 5.00 GiB of KV cache, but 3.25 GiB is "
    "available"
)
SECRETS = st.text(
    "abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789", min_size=12, max_size=40
).filter(lambda text: any(c.isdigit() for c in text) and any(c.isalpha() for c in text))
CARRIERS = (
    "--api-key {}",
    "--api-key={}",
    "HF_TOKEN={} vllm serve m",
    "export OPENAI_API_KEY='{}'",
    '"password": "{}"',
    "'hf_token': ['{}']",
    "https://user:{}@host/path",
    "Authorization: Bearer {}",
    "--hf-token '{}'",
    "db_password: {}",
    "['vllm', '--api-key', '{}']",
    "curl 'https://host/v1?key={}&n=1'",
    "hf_{}abcdef",
    "- name: HF_TOKEN\n  value: {}",
    "/home/{}/models",
    "/Users/{}/x.log",
    "C:\\Users\\{}\\x",
    "file:///home/{}/x",
    "/mnt/c/Users/{}",
    "PATH=/bin:/home/{}/bin",
    "Received request cmpl-1: prompt: 'x {} y', params: SamplingParams(n=1), prompt_token_ids: [1, 2]",
    '{{"messages": [{{"role": "user", "content": "x {} y"}}]}}',
    'prompt="x {} y',
    "prompts=['a', 'b {}']",
    "Prompt: 'a', Generated text: '{}'",
    '{{"log": "{{\\"prompt\\": \\"x {} y\\"}}"}}',
)


@settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(secret=SECRETS, carrier=st.sampled_from(CARRIERS))
def test_a_secret_never_survives(secret, carrier):
    diagnosis = laden(carrier.format(secret))
    for name, form in FORMS.items():
        assert secret not in form(diagnosis), name


def test_masking_can_be_turned_off():
    with unmasked():
        for name, form in FORMS.items():
            assert "abcdefgh1234" in form(laden("--api-key=abcdefgh1234")), name


def test_a_form_can_be_written_whatever_the_log_holds():
    text = "".join(map(chr, range(0x250))) + "\u2028\u202e\ud800\udcff\U0001f600\ufffe"
    for form in FORMS.values():
        form(laden(text)).encode("utf-8")


def test_no_escape_of_the_log_is_left():
    for name in ["terminal", "markdown", "html", "notebook", "note", "json", "run.json"]:
        text = FORMS[name](laden("\x1b[2J\x9b31m\x07\u202eboom\x7f"))

        assert "boom" in text, name
        assert not {c for c in text if ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e"} - {
            "\n"
        }, name


def test_starts_ranks_and_parents_are_named(diagnosis_of_all):
    for name in ["terminal", "markdown", "html", "notebook"]:
        text = FORMS[name](diagnosis_of_all).replace("\\_", "_")

        assert "start 2" in text, name
        assert "also in Worker_TP1, Worker_TP2" in text, name
        assert "passed on at line 120" in text, name


def test_the_first_of_one_start_says_nothing_of_starts(incident):
    for name in ["terminal", "markdown", "html", "notebook"]:
        assert "start 1" not in FORMS[name](Diagnosis("", (replace(incident, start=1),))), name


def test_equal_failures_of_several_starts_are_shown_once(incident):
    for name in ["terminal", "markdown", "html", "notebook"]:
        again = replace(incident, start=3, location=Location(400))

        text = FORMS[name](Diagnosis("", (incident, again)))

        assert text.count(FAILURE) == 1, name
        assert "printed 4 times; starts 2, 3" in text, name


def test_a_healthy_log_shows_its_starts(start):
    for name in ["terminal", "markdown", "html", "notebook"]:
        text = FORMS[name](Diagnosis("ok.log", starts=(start,)))

        assert "no memory failure found" in text, name
        for part in (
            "start 1, vllm 0.32.0",
            "org/m",
            "8192",
            "weights",
            "15.00 GiB",
            "KV cache",
            "17%",
        ):
            assert part in text, name
        assert "The KV cache holds 29,040 tokens: 3.54 requests of 8,192 tokens at once" in text, (
            name
        )


def test_every_part_of_an_incident_is_there(diagnosis_of_all):
    for name in ["terminal", "markdown", "html", "notebook"]:
        text = FORMS[name](diagnosis_of_all)

        for part in (
            FAILURE,
            "kv_cache_too_small_for_max_len",
            "15.00 GiB",
            "62%",
            "not accounted for",
            "It does not fit",
            "One request needs more.",
            "--max-model-len 26624",
            "Longer requests are refused.",
            "Turn on kv_cache_dtype",
            "--kv-cache-memory-bytes 5368709120",
            "a byte count you set",
            "model configuration: not printed",
            "a note",
        ):
            assert part.lower() in text.lower().replace("90% sure", "confidence 0.90"), (name, part)
        assert re.search(r"line 61: |error\.log:61 ", text), name
        assert "vllm 0.32.0" in text.lower(), name


def test_the_starts_of_a_failed_log_are_in_the_json(diagnosis_of_all):
    (start,) = json.loads(to_json(diagnosis_of_all))["starts"]

    assert (start["start"], start["framework"], start["framework_version"], start["line"]) == (
        1,
        "vllm",
        "0.32.0",
        14,
    )
    assert start["settings"]["max_model_len"] == {
        "value": 8192,
        "set_by_user": True,
        "source": "printed",
    }
    assert start["facts"]["kv_cache_capacity_tokens"] == 29040
    assert [part["name"] for part in start["budget"]["parts"]] == ["weights", "KV cache", "free"]


def _on_a_terminal(diagnosis: Diagnosis) -> str:
    console = Console(width=100, file=io.StringIO())
    print_diagnosis(console, diagnosis, full=True)
    return console.file.getvalue()


def test_alternative_without_a_value_names_only_the_setting():
    for form in [to_markdown, to_html, _on_a_terminal]:
        other = Alternative("device", None, "one of 24 GiB would do")
        told = form(Diagnosis("", (Incident("cuda_oom", "boom", alternatives=(other,)),)))
        assert "one of 24 GiB would do" in told, form
        assert "None" not in told, form


def test_contradicting_numbers_are_one_line_in_every_format(incident):
    text = "11.30 GiB in tensors, but the device has 8.00 GiB"
    diagnosis = Diagnosis("error.log", (replace(incident, budget=Budget(8 * 2**30, (), text)),))

    line = f"The printed numbers contradict each other: {text}."
    for form in (terminal, to_html, to_markdown):
        assert line in form(diagnosis)
    assert json.loads(to_json(diagnosis))["incidents"][0]["budget"]["conflict"] == text
